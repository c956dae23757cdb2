"""Bundles of runs: what one has of plan, answers, findings and logs, without secrets, and how it is read to people."""

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from time import time
from typing import Any

import msgspec

from stageline.broker.control.pace_answers import StatusFacts, WhyFacts
from stageline.broker.errors import BrokerError
from stageline.pipeline.errors import StagelineError
from stageline.pipeline.plan.keys.models import TABLES, section
from stageline.pipeline.plan.tables import flat
from stageline.pipeline.printable import bounded, printable_line
from stageline.workers.control.client import BrokerUnreachable
from stageline.workers.keys.key_file import key_path
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import Facts
from stageline.workers.runs.listing import recorded_answer
from stageline.workers.runs.logs import own_text
from stageline.workers.runs.records import RecordedRun, recorded_run
from stageline.workers.runs.scrub import Scrub, argument, is_secret_name, passwords_in

from . import options
from .bundle_archive import (
    LARGEST,
    MANIFEST,
    MOST,
    MOST_FILES,
    Bundle,
    BundledFile,
    BundleManifest,
    BundleUnreadable,
    end_of,
    is_name,
)
from .output import say
from .printed import DoctorFinding

Ask = Callable[..., Facts]
Show = Callable[[Facts], None]

_QUESTIONS = {  # with what the answer is
    "status": "state of the run and its workers",
    "why": "what it waits for, or what limits it",
    "queues": "queues, with their counts",
    "microbatches": "microbatches that are not done",
    "history": "losses of workers, and checkpoints",
    "timetable": "when the actions of the newest step ran",
}
_ARGUMENTS = ("options", "groups")  # keys of a plan whose values are arguments of the user's code
_BESIDE = ("schema", "source", "as_of", "folder", "state", "result")  # what commands add to an answer
_KEPT_LOSSES = 1000  # newest ones in the status
_UNREADABLE = (StagelineError, BrokerError, OSError, ValueError, sqlite3.Error)
_UNTELLABLE = (  # what no broker has answered may be of the right form, and yet say nothing
    *(msgspec.MsgspecError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError),
)
_SIGNS = {"good": "ok", "note": "note", "bad": "WRONG"}


class Collected:
    """Files of a bundle, bounded in number and size.

    Attributes:
        files: Contents by name.
        listed: What each is.
        left_out: What is not there, and why.
    """

    def __init__(self, scrub: Scrub) -> None:
        """Begin without files; `scrub` takes secrets out of all that is added."""
        self.files: dict[str, bytes] = {}
        self.listed: list[BundledFile] = []
        self.left_out: list[str] = []
        self._scrub = scrub

    def add(self, name: str, what: str, make: Callable[[], object]) -> None:
        """Add what `make` returns, a text or facts; if that fails, or is too large, the reason is kept."""
        try:
            found = make()
        except _UNREADABLE as error:
            self.left_out.append(self._scrub.text(f"{name}: {error}"))
            return
        if isinstance(found, str):
            content = self._scrub.text(found).encode()
        else:
            content = msgspec.json.encode(self._scrub.facts(msgspec.to_builtins(found)))
        room = min(LARGEST, MOST - 2**20 - sum(map(len, self.files.values())))
        if len(content) > room or len(self.files) >= MOST_FILES - 1:
            self.left_out.append(f"{name}: there is no room for its {len(content)} bytes")
            return
        self.files[name] = content
        self.listed.append(BundledFile(name, len(content), what))


@contextmanager
def asking(folder: Path) -> Iterator[tuple[Ask, str]]:
    """Return a context with a function that asks about a run, and the state of the run if it asks the run's records.

    The state is "" if the run's broker answers.
    """
    with ExitStack() as opened:
        try:
            ask = opened.enter_context(options.asking(str(folder), None))
            ask("status")
            state = ""
        except BrokerUnreachable:
            recorded = opened.enter_context(recorded_run(folder))
            ask, state = partial(_recorded, recorded), str(recorded.state)
        yield ask, state


def _recorded(recorded: RecordedRun, query: str, **of: str) -> Facts:
    return recorded_answer(recorded, query, of)


def collect(folder: Path, ask: Ask, state: str) -> tuple[BundleManifest, Mapping[str, bytes]]:
    """Return what a bundle of the run in `folder` has: its manifest and its other files.

    Args:
        folder: Folder of the run.
        ask: Asks the broker, or the records.
        state: State of the run, if the records are asked.
    """
    plan = _plan(folder)
    found = Collected(Scrub(_secrets(folder, plan, os.environ)))
    found.add("plan.json", "settings; of arguments of your code, numbers alone", lambda: _told_plan(plan))
    found.add("doctor.json", "versions, memory and sockets of this machine", _findings)
    for query, what in _QUESTIONS.items():
        found.add(f"{query}.json", what, lambda query=query: _answer(ask, query))  # type: ignore[misc]
    if not state:
        found.add("stack.json", "places in the code where workers are", lambda: _stacks(ask))
    for log in sorted(folder.glob("*.log")):
        if is_name(log.name):
            what = "end of a log: lines of stageline, and of errors"
            found.add(f"logs/{log.name}", what, lambda log=log: end_of(log, own_text))  # type: ignore[misc]
    manifest = BundleManifest(
        version=metadata.version("stageline"),
        made=time(),
        run=folder.resolve().name,
        source="records" if state else "broker",
        state=state,
        files=found.listed,
        left_out=found.left_out,
    )
    return manifest, found.files


def _answer(ask: Ask, query: str) -> Facts:
    facts = ask(query)
    if query == "status":
        losses = list(facts["losses"].items())[-_KEPT_LOSSES:]
        facts = {**facts, "losses": dict(losses), "keys": None}
    return {name: each for name, each in facts.items() if name not in _BESIDE}


def _stacks(ask: Ask) -> list[Facts]:
    """Return the stacks of all workers, without lines of code: these may have a secret in them."""
    found = []
    for worker in ask("status")["workers"]:
        with suppress(ValueError):
            (facts,) = ask("stack", worker=str(worker["index"]))["workers"]
            found.append(facts)
    bare = [
        {**thread, "frames": [{**frame, "text": ""} for frame in thread["frames"]]}
        for facts in found
        for thread in facts["threads"]
    ]
    sizes = iter(bare)
    return [{**facts, "threads": [next(sizes) for _ in facts["threads"]]} for facts in found]


def _findings() -> list[Any]:
    from stageline.workers.extras.preflight.doctor import examine  # imports torch

    with tempfile.TemporaryDirectory(prefix="stageline-", ignore_cleanup_errors=True) as folder:
        return list(examine(None, Path(folder), _untried))


def _untried(*_: object, **__: object) -> Any:
    raise AssertionError("no plan is tried")


def _plan(folder: Path) -> Mapping[str, Any]:
    """Return the plan of a run; nothing if there is none to read."""
    try:
        return msgspec.json.decode((folder / runs.PLAN).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}


def _told_plan(plan: Mapping[str, Any]) -> Facts:
    return {table: _told_table(table, settings) for table, settings in plan.items()}


def _told_table(table: str, settings: object) -> object:
    """Return a table of a plan: what its user's code gets as arguments is told in part."""
    if table not in TABLES:
        return argument(settings)
    if not isinstance(settings, Mapping):
        return settings
    known = {key for key in section(table).model_fields if key not in _ARGUMENTS}
    return {key: value if key in known else argument(value) for key, value in settings.items()}


def _secrets(folder: Path, plan: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield what must not be in a bundle, as far as it is known: of this user, this run and this process."""
    with suppress(OSError, ValueError):
        yield from _words(key_path(None, environment))
    for key in folder.glob("*.secret"):
        yield from _words(key)
    yield runs.read_control_secret(folder).hex()
    for name, value in environment.items():
        if is_secret_name(name):
            yield value
        yield from passwords_in(value)
    yield from _of_settings(plan)


def _words(path: Path) -> Iterator[str]:
    """Yield the words of a file with a secret; public keys in its comments are none."""
    with suppress(OSError):
        for line in path.read_text("utf-8", "replace").splitlines():
            if not line.startswith("#"):
                yield from line.split()


def _of_settings(value: object, name: str = "") -> Iterator[str]:
    if isinstance(value, str):
        yield from passwords_in(value)
        if is_secret_name(name):
            yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _of_settings(each, str(key))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _of_settings(each, name)


class BundleReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of a bundle, for people.

    Attributes:
        bundle: What the bundle is of.
        plan: Settings of the run.
        findings: What `stageline doctor` has found on the machine.
        status: Answer of `stageline status`; None if it is not there.
        why: Answer of `stageline why`; None if it is not there.
    """

    bundle: BundleManifest
    plan: dict[str, Any]
    findings: list[DoctorFinding]
    status: StatusFacts | None
    why: WhyFacts | None


def report_of(path: Path) -> BundleReport:
    """Return what the bundle at `path` tells. Raises `BundleUnreadable`, `OSError`."""
    found = Bundle(path)
    return BundleReport(
        bundle=found.manifest,
        plan=_read(found, "plan.json", dict[str, Any], {}),
        findings=_read(found, "doctor.json", list[DoctorFinding], []),
        status=_read(found, "status.json", StatusFacts, None),
        why=_read(found, "why.json", WhyFacts, None),
    )


def _read(bundle: Bundle, name: str, kind: Any, default: Any) -> Any:
    return bundle.read(name, kind) if name in bundle else default


def tell(report: BundleReport, show_status: Show, show_cause: Show) -> None:
    """Print a report, with the functions by which `status` and `why` print their answers.

    Raises `BundleUnreadable` for answers that cannot be told, such as one with a time that no calendar has.
    """
    with _doubted():
        _tell(report, show_status, show_cause)


@contextmanager
def _doubted() -> Iterator[None]:
    try:
        yield
    except _UNTELLABLE as error:
        said = printable_line(bounded(f"{type(error).__name__}: {error}"))
        raise BundleUnreadable(f"the bundle has an answer that cannot be told ({said}); ask for it again") from error


def _tell(report: BundleReport, show_status: Show, show_cause: Show) -> None:
    made = report.bundle
    say(f"bundle of run {made.run}, made {datetime.fromtimestamp(made.made):%F %T} by stageline {made.version}")
    say(f"files: {', '.join([MANIFEST, *(each.name for each in made.files)])}")
    for each in made.left_out:
        say(f"left out: {each}")
    for finding in report.findings:
        say(f"{_SIGNS.get(finding.health, '?'):5} {finding.what}: {finding.found}")
    for key, value in flat(report.plan).items():
        say(f"{key} = {value}")
    state = {"state": made.state} if made.state else {}
    if report.status is not None:
        show_status({**msgspec.to_builtins(report.status), **state})
    if report.why is not None:
        show_cause({**msgspec.to_builtins(report.why), **state})
