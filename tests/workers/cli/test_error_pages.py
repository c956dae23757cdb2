"""The codes of errors: one for each class that a user meets, never another's, explained by the page and the command."""

import ast
import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pkgutil import walk_packages

import jsonschema
import pytest

from stageline.pipeline.errors import Bug, DataError, ModelRefused, StagelineError
from stageline.pipeline.plan import PlanError, PlanRefused
from stageline.workers.cli.app import run
from stageline.workers.cli.error_pages import error_pages
from stageline.workers.cli.output import CommandFailed
from stageline.workers.cli.schemas import schema_of
from stageline.workers.control.joining import Stopped
from support.paths import DOCS, ROOT

TOPS = ("pipeline", "broker", "workers")
# A base, of which there are no errors, and texts of a command or of a worker's end, which have the code of their cause.
WITHOUT = {"BrokerError", "CommandFailed", "Left", "Stopped"}
# Only new lines may come: a class may get another name, and keeps its code; that of a class that goes is not reused.
CODES = {
    "SL101": "PlanRefused",
    "SL102": "ScheduleRefused",
    "SL103": "UnsoundSchedule",
    "SL104": "Incomplete",
    "SL105": "Disordered",
    "SL106": "Deadlock",
    "SL107": "FeatureRefused",
    "SL108": "NoFit",
    "SL109": "TrialFailed",
    "SL201": "ModelRefused",
    "SL202": "DataError",
    "SL203": "ComputeFailed",
    "SL204": "BadMicrobatch",
    "SL205": "GradientNotFinite",
    "SL206": "LossNotScalar",
    "SL207": "StageError",
    "SL208": "SplitDraw",
    "SL209": "GroupLost",
    "SL210": "FeatureFailed",
    "SL211": "WeightsUnusable",
    "SL212": "PrefixCacheFailed",
    "SL213": "TapsUnusable",
    "SL214": "NoTaps",
    "SL215": "TapFailed",
    "SL216": "ProbeRefused",
    "SL301": "BadMessage",
    "SL302": "ForeignMessage",
    "SL303": "Unsendable",
    "SL304": "Overwritten",
    "SL305": "Disagreement",
    "SL306": "QueueFull",
    "SL307": "QueueClosed",
    "SL308": "Fenced",
    "SL309": "EndpointTaken",
    "SL310": "AddressUnusable",
    "SL311": "BrokerUnreachable",
    "SL312": "NoAnswer",
    "SL313": "RedisAway",
    "SL314": "RedisGarbled",
    "SL315": "RedisRefusal",
    "SL316": "RedisKeyTaken",
    "SL317": "RedisUnfit",
    "SL318": "StoreUnusable",
    "SL319": "OrderMissing",
    "SL320": "TooDeep",
    "SL401": "SnapshotFailed",
    "SL402": "SnapshotsDiffer",
    "SL403": "SnapshotDamaged",
    "SL404": "NoCheckpoint",
    "SL405": "NotSaved",
    "SL406": "RunMovedOn",
    "SL407": "WriteFailed",
    "SL408": "EvaluationsDiffer",
    "SL409": "NotRecorded",
    "SL410": "RecordDamaged",
    "SL411": "NoSuchMicrobatch",
    "SL412": "RecordsDamaged",
    "SL413": "OtherRun",
    "SL414": "ForeignState",
    "SL415": "BundleUnreadable",
    "SL416": "SnapshotLost",
    "SL501": "RunFailed",
    "SL502": "NoSuchRun",
    "SL503": "RunGoesOn",
    "SL504": "FolderUnusable",
    "SL505": "QueryRefused",
    "SL506": "MetricsNotWritten",
    "SL507": "TensorBoardMissing",
    "SL508": "ForwardFailed",
    "SL509": "LineClosed",
    "SL510": "CannotFork",
    "SL511": "NotStarted",
    "SL512": "CannotJoin",
    "SL513": "NotAdmitted",
    "SL514": "WorkersMissing",
    "SL515": "CallRefused",
    "SL516": "RunKept",
    "SL517": "ExporterMissing",
    "SL518": "TrackerFailed",
    "SL520": "DashboardMissing",
    "SL601": "BadKey",
    "SL602": "BadJoinLine",
    "SL603": "NotEnrolled",
    "SL604": "KeyUnusable",
    "SL605": "KeyExists",
    "SL606": "KeyRefused",
    "SL607": "KeyMissing",
    "SL608": "KeyLocked",
    "SL610": "AllowFileWrong",
    "SL611": "NoConsent",
    "SL612": "UseNotRecorded",
    "SL616": "NotOfParty",
    "SL617": "PartiesDiffer",
    "SL900": "Bug",
    "SL901": "QueueGap",
    "SL902": "IllegalTransition",
    "SL903": "GradientMismatch",
}
OWN = 0.2  # the part of a message that must be its own words, and no values, for its place in the sources to be sure


@cache
def classes() -> tuple[type[StagelineError], ...]:
    """Return every class of errors: all modules are imported."""
    for top in TOPS:
        package = import_module(f"stageline.{top}")
        for module in walk_packages(package.__path__, f"stageline.{top}."):
            if ".templates" not in module.name:
                import_module(module.name)
    return tuple(below(StagelineError))


pages = cache(error_pages)


def below(base: type[StagelineError]) -> Iterator[type[StagelineError]]:
    for each in base.__subclasses__():
        if each.__module__.startswith("stageline."):
            yield each
            yield from below(each)


def test_every_class_of_errors_has_a_code_of_its_own():
    own = {each.__name__: vars(each).get("error_code") for each in classes()}
    assert {name for name, code in own.items() if not code} == WITHOUT
    assert sorted(code for code in own.values() if code) == sorted(CODES)


def test_no_code_is_ever_given_to_another_error():
    assert {code: page.name for code, page in pages().items()} == CODES


def test_the_page_is_what_the_command_prints(capsys):
    assert run(["errors", "--page"]) == 0
    wanted = capsys.readouterr().out
    assert (DOCS / "reference/errors.md").read_text() == wanted, "stageline errors --page > docs/reference/errors.md"


@cache
def templates() -> tuple[list[str], ...]:
    """Return the own words of every text in the sources: of an f-string, what stands between its values."""
    found = []
    for file in (file for top in TOPS for file in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.JoinedStr(values):
                    found.append([str(part.value) for part in values if isinstance(part, ast.Constant)])
                case ast.Constant(str(text)):
                    found.append(re.split(r"\{\w*\}", text))  # of a text that `format` fills in
    return tuple(found)


@pytest.mark.parametrize("code", CODES)
def test_the_example_of_an_error_is_in_words_that_the_sources_have(code):
    """Fails for a message that is worded otherwise by now: its example is one that no user will see."""
    example = pages()[code].example
    fitting = (words for words in templates() if all(each in example for each in words))
    patterns = (".*".join(map(re.escape, words)) for words in fitting if len("".join(words)) >= OWN * len(example))
    assert any(re.search(pattern, example) for pattern in patterns), example


@pytest.mark.parametrize("code", ["SL101", "SL306", "SL900"])
def test_the_command_explains_a_code_as_the_page_does(code, capsys):
    assert run(["errors", code]) == 0
    printed, page = capsys.readouterr().out, pages()[code]
    assert all(text in printed for text in (code, page.name, page.cause, page.mend, f"{page.example} [{code}]"))


@pytest.mark.parametrize("given", ["SL306", "sl306", "306", "[SL306]", "SL3O6", "QueueFull"])
def test_a_code_may_be_typed_in_any_form(given, capsys):
    assert run(["errors", given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, schema_of("errors/1"))
    [told] = found["errors"]
    assert (told["code"], told["name"]) == ("SL306", "QueueFull")


@pytest.mark.parametrize(
    ("given", "near"), [("SL110", "SL109"), ("QueueFul", "QueueFull"), ("disk", "stageline errors")]
)
def test_an_unknown_code_is_refused_with_near_ones(given, near, capsys):
    assert run(["errors", given]) == 2
    told = capsys.readouterr().err
    assert f"there is no error {given}" in told
    assert near in told


def test_errors_are_listed_and_searched(capsys):
    assert run(["errors"]) == 0
    assert set(CODES) <= set(capsys.readouterr().out.split())
    assert run(["errors", "--search", "MAXMEMORY"]) == 0
    found = capsys.readouterr().out
    assert "SL315" in found
    assert "SL101" not in found
    assert run(["errors", "--search", "no such words"]) == 2


def test_the_text_of_an_error_ends_with_its_code():
    error = PlanRefused([PlanError("run.steps", "expected 1 or more"), PlanError("run.name", "expected text")])
    assert str(error).endswith("expected text [SL101]")
    assert "SL101" not in error.args[0]
    assert str(copy.copy(error)) == str(error)


def test_a_quoted_error_keeps_the_code_that_is_nearer_to_the_cause():
    """Each class on the way added its own, and a message had three."""
    cause = DataError("batch(3) has no rows")
    assert str(ModelRefused(f"the first batch: {cause}. Give rows")) == (
        "the first batch: batch(3) has no rows [SL202]. Give rows"
    )
    assert str(Stopped(f"worker 1 failed: {cause}", 1)) == f"worker 1 failed: {cause}"
    assert str(CommandFailed("there is no folder runs", 2)) == "there is no folder runs"


def test_a_bug_has_a_code_in_a_worker_and_in_a_command():
    assert str(Bug(KeyError(3))) == "a bug in stageline: KeyError: 3 [SL900]"
