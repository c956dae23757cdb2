"""The owner of data allows plans, code and sources: all else is refused before an import, and use is recorded."""

import json
import os
import py_compile
import re
import tomllib
from collections.abc import Iterator
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from stageline.pipeline.errors import ExitCode
from stageline.pipeline.model.consent import demand_consent
from stageline.pipeline.model.load import load_inputs
from stageline.pipeline.model.own_schedule import read_plan
from stageline.pipeline.plan import from_mapping
from stageline.workers.extras.consent.allow_file import AllowFileWrong, NoConsent, entry_text, read_allowed
from stageline.workers.extras.consent.code_files import is_own
from stageline.workers.extras.consent.guard import keep_to
from support.workspace import DATA, MODEL, Workspace

LEAVES_A_TRACE = "from pathlib import Path\nwith Path('trace').open('a') as trace:\n    trace.write({name!r} + ' ')\n"
HELPED = "import helper\n"
WORKER = ("worker", ".", "--broker", "ipc:///nowhere", "--patience", "0")


@pytest.fixture
def owner(workspace: Workspace) -> Iterator["Owner"]:
    """The owner of data, whose code tells when it is imported: data.py, which imports helper.py, and model.py."""
    workspace.write("helper.py", LEAVES_A_TRACE.format(name="helper"))
    workspace.write("data.py", LEAVES_A_TRACE.format(name="data") + HELPED + DATA)
    workspace.write("model.py", LEAVES_A_TRACE.format(name="model") + MODEL)
    return Owner(workspace)


class Owner:
    """The owner of data in a workspace, with the file `allow.toml`."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.file = workspace.folder / "allow.toml"

    def allow(self, *options: str, sets: tuple[str, ...] = ()) -> None:
        """Add the entry that `stageline allow` prints to the file."""
        printed = self.workspace.command("allow", ".", *options, *(word for each in sets for word in ("--set", each)))
        assert printed.returncode == 0, printed.stderr
        with self.file.open("a") as file:
            file.write(printed.stdout)

    def change(self, name: str, before: str, after: str) -> None:
        text = (self.workspace.folder / name).read_text()
        assert before in text
        self.workspace.write(name, text.replace(before, after))

    def refusal(self, *options: str, **environment: str) -> str:
        """The text by which a worker is refused. Nothing has been imported, and no use begun."""
        ended = self.workspace.command(*WORKER, *(options or ("--allow", "allow.toml")), **environment)
        assert ended.returncode == ExitCode.REFUSED, ended.stderr
        assert not (self.workspace.folder / "trace").exists()
        assert not self.lines()
        return ended.stderr

    def work(self, *options: str, **environment: str) -> list[str]:
        """Run a worker up to the broker, which is not there; return the files that were imported."""
        ended = self.workspace.command(*WORKER, *(options or ("--allow", "allow.toml")), **environment)
        assert ended.returncode == ExitCode.NO_BROKER, ended.stderr
        return (self.workspace.folder / "trace").read_text().split()

    def lines(self) -> list[dict[str, Any]]:
        """The record of use."""
        file = self.workspace.folder / "data-use.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_without_the_option_everything_is_opened_and_nothing_is_recorded(owner: Owner) -> None:
    assert owner.work("--index", "0") == ["model", "data", "helper"]
    assert not owner.lines()


@pytest.mark.parametrize("text", [None, "# nothing yet\n"])
def test_a_file_that_is_missing_or_empty_allows_nothing_and_the_refusal_says_how_to_allow(
    owner: Owner, text: str | None
) -> None:
    if text is not None:
        owner.file.write_text(text)
    told = owner.refusal()
    assert "plan small is not allowed by allow.toml:" in told
    assert "stageline allow stageline.toml" in told
    assert "[SL611]" in told


def test_what_allow_prints_allows_the_plan_and_prints_it_without_running_its_code(owner: Owner) -> None:
    owner.allow("--asked-by", "Anna, at the lab", "--until", "2999-12-31")
    assert not (owner.workspace.folder / "trace").exists()
    (entry,) = tomllib.loads(owner.file.read_text())["allow"]
    assert entry["sources"] == ["data.py:batches"]
    files = ("data.py", "helper.py", "model.py")
    assert entry["code"] == {name: sha256((owner.workspace.folder / name).read_bytes()).hexdigest() for name in files}
    assert entry["keys"]["run.steps"] == 6
    assert owner.work() == ["model", "data", "helper"]


def test_the_environment_names_the_file_too_and_an_empty_name_is_no_way_around(owner: Owner) -> None:
    assert "SL611" in owner.refusal("--index", "0", STAGELINE_ALLOW="allow.toml")
    ended = owner.workspace.command(*WORKER, STAGELINE_ALLOW="")
    assert ended.returncode == ExitCode.USAGE
    assert "STAGELINE_ALLOW" in ended.stderr
    owner.allow()
    assert owner.work("--index", "0", STAGELINE_ALLOW="allow.toml")


@pytest.mark.parametrize("name", ["model.py", "data.py", "helper.py"])
def test_a_file_of_code_that_was_changed_is_named_before_any_is_imported(owner: Owner, name: str) -> None:
    owner.allow()
    before = sha256((owner.workspace.folder / name).read_bytes()).hexdigest()
    owner.change(name, "from pathlib", "import sys\nfrom pathlib")
    after = sha256((owner.workspace.folder / name).read_bytes()).hexdigest()
    told = owner.refusal()
    assert f"{name} is not the file that was allowed" in told
    assert before[:16] in told
    assert after[:16] in told


def test_another_plan_of_that_name_is_refused_with_the_keys_in_which_it_differs(owner: Owner) -> None:
    owner.allow()
    told = owner.refusal("--allow", "allow.toml", "--set", "run.steps=600", "--set", "optimizer.options.momentum=0.5")
    assert "run.steps is 600 here, 6 there" in told
    assert "optimizer.options.momentum is 0.5 here, not set there" in told
    command = re.search(r"stageline allow .*'run.steps=600'|stageline allow .*run.steps=600", told)
    assert command is not None, told
    owner.allow(sets=("run.steps=600", "optimizer.options.momentum=0.5"))
    sets = ("--set", "run.steps=600", "--set", "optimizer.options.momentum=0.5")
    assert owner.work("--allow", "allow.toml", *sets)


def test_an_address_in_the_plan_to_which_activations_would_go_is_part_of_the_entry(owner: Owner) -> None:
    """The digest leaves addresses out, since machines may differ in them; those that the owner types are his own."""
    owner.allow()
    assert owner.work("--allow", "allow.toml", "--set", "queues.url=tcp://127.0.0.1:0")
    (owner.workspace.folder / "trace").unlink()
    (owner.workspace.folder / "data-use.jsonl").unlink()
    plan = (owner.workspace.folder / "stageline.toml").read_text()
    owner.workspace.write("stageline.toml", plan + '[queues]\nurl = "redis://elsewhere:6379/0"\n')
    assert 'queues.url is "redis://elsewhere:6379/0" here, not set there' in owner.refusal()
    owner.allow()
    assert '"queues.url" = "redis://elsewhere:6379/0"' in owner.file.read_text()


def test_an_entry_of_another_plan_allows_no_plan_with_the_same_code(owner: Owner) -> None:
    owner.allow()
    assert "it lists small" in owner.refusal("--allow", "allow.toml", "--set", "run.name=b", "--set", "run.seed=3")


def test_each_line_of_an_entry_counts(owner: Owner) -> None:
    owner.allow()
    text = owner.file.read_text()
    owner.file.write_text(text.replace('"run.steps" = 6', '"run.steps" = 3'))
    assert "run.steps is 6 here, 3 there" in owner.refusal()
    owner.file.write_text(text.replace("sources =", "until = 2020-01-31\nsources ="))
    assert "it was allowed until 2020-01-31" in owner.refusal()
    owner.file.write_text(re.sub(r'"helper.py" = .*\n', "", text))
    assert "helper.py is imported and not listed" in owner.refusal()


def test_a_source_that_the_owner_has_taken_out_is_not_opened(owner: Owner) -> None:
    owner.allow()
    owner.change("allow.toml", '"data.py:batches"]', '"data.py:others"]')
    ended = owner.workspace.command(*WORKER, "--allow", "allow.toml")
    assert ended.returncode == ExitCode.REFUSED
    assert "data.py:batches would be opened" in ended.stderr
    assert "data.py:others" in ended.stderr
    assert (owner.workspace.folder / "trace").read_text().split() == ["model"]
    assert not owner.lines()


def test_an_import_that_reading_does_not_find_is_refused_when_it_comes_with_the_line_that_allows_it(
    owner: Owner,
) -> None:
    owner.change("data.py", HELPED, "import importlib\nimportlib.import_module('hel' + 'per')\n")
    owner.allow()
    ended = owner.workspace.command(*WORKER, "--allow", "allow.toml")
    assert ended.returncode == ExitCode.REFUSED
    assert (owner.workspace.folder / "trace").read_text().split() == ["model", "data"]
    line = re.search(r'"helper.py" = "[0-9a-f]{64}"', ended.stderr)
    assert line is not None
    owner.change("allow.toml", "[allow.code]\n", f"[allow.code]\n{line[0]}\n")
    assert owner.work()[-1] == "helper"


def test_bytecode_that_lies_beside_a_file_is_not_executed(owner: Owner) -> None:
    owner.allow()
    helper = owner.workspace.folder / "helper.py"
    listed, times = helper.read_text(), os.stat(helper)
    helper.write_text(listed.replace("'helper '", "'HELPER '").replace("helper", "HELPER"))
    os.utime(helper, ns=(times.st_atime_ns, times.st_mtime_ns))
    py_compile.compile(str(helper), doraise=True)
    helper.write_text(listed)
    os.utime(helper, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert owner.work() == ["model", "data", "helper"]


def test_the_use_of_a_source_is_recorded_from_its_begin_to_its_end(owner: Owner) -> None:
    owner.allow("--asked-by", "Anna")
    owner.work()
    (entry,) = read_allowed(owner.file).allow
    begin, *_, end = owner.lines()
    for line in (begin, end):
        assert line["source"] == ["data.py:batches"]
        assert (line["plan"], line["name"], line["asked_by"]) == (entry.plan, "small", "Anna")
        assert line["process"] == "worker"
        assert all(line[key] for key in ("at", "use", "host", "user", "pid"))
    assert (begin["event"], begin["batches"], begin["rows"]) == ("begin", 0, 0)
    assert (end["event"], end["batches"], end["rows"]) == ("end", 1, 8)  # the rows held out
    assert owner.workspace.folder.joinpath("data-use.jsonl").stat().st_mode & 0o077 == 0


def test_train_keeps_to_the_file_with_its_trials_and_records_the_run(owner: Owner) -> None:
    sets = ("queues.url=memory://", "data.check=false")
    arguments = [word for each in sets for word in ("--set", each)]
    refused = owner.workspace.command("train", "--allow", "allow.toml", *arguments)
    assert refused.returncode == ExitCode.REFUSED
    assert not (owner.workspace.folder / "trace").exists()
    assert not owner.workspace.runs()
    owner.allow(sets=sets)
    ended = owner.workspace.command("train", "--allow", "allow.toml", "--json", *arguments)
    assert ended.returncode == 0, ended.stderr
    assert "trial" in {line["process"] for line in owner.lines()}
    (run,) = owner.workspace.runs()
    of_run = [line for line in owner.lines() if line["run"]]
    assert {line["run"] for line in of_run} == {run.name}
    assert of_run[-1]["event"] == "end"
    assert of_run[-1]["rows"] == 8 + 6 * 6 - 4  # held out, and six batches of 32 rows in an epoch, the last with 2
    freely = owner.workspace.command("train", "--json", *arguments)
    digests = [json.loads(each.stdout)["weights_sha256"] for each in (ended, freely)]
    assert digests[0] == digests[1]


def test_a_process_that_is_killed_leaves_whole_lines(owner: Owner) -> None:
    owner.change("data.py", "import helper\n", "import helper, os, signal\nfrom stageline import Rows as All\n")
    owner.change(
        "data.py",
        "    return Rows(",
        "    class Rows(All):\n"
        "        def batch(self, step):\n"
        "            return super().batch(step) if step < 3 else os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return Rows(",
    )
    sets = ("queues.url=memory://", "data.check=false")
    owner.allow(sets=sets)
    owner.workspace.command("train", "--allow", "allow.toml", *(word for each in sets for word in ("--set", each)))
    text = (owner.workspace.folder / "data-use.jsonl").read_text()
    assert text.endswith("\n")
    lines = owner.lines()
    assert [line["batches"] for line in lines if line["run"]] == [1, 2, 4]  # the rows held out, and three batches
    assert "end" not in {line["event"] for line in lines if line["run"]}


def test_a_line_that_was_cut_off_stays_a_line_of_its_own(owner: Owner) -> None:
    owner.allow()
    record = owner.workspace.folder / "data-use.jsonl"
    record.write_text('{"at": "20')
    owner.work()
    cut, *others = record.read_text().splitlines()
    assert cut == '{"at": "20'
    assert [json.loads(line)["event"] for line in others] == ["begin", "read", "end"]


def test_data_whose_use_cannot_be_recorded_are_not_opened(owner: Owner) -> None:
    owner.allow()
    owner.file.write_text('record = "/dev/full"\n' + owner.file.read_text())
    ended = owner.workspace.command(*WORKER, "--allow", "allow.toml")
    assert ended.returncode == ExitCode.FAILED
    assert "/dev/full" in ended.stderr
    assert "[SL612]" in ended.stderr
    assert (owner.workspace.folder / "trace").read_text().split() == ["model"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[allow]\n", "this is not TOML"),
        ("allowed = []\n", "allowed"),
        ("[[allow]]\n", "entry 1: Object missing required field `name`"),
        ('[[allow]]\nname = "a"\nplan = "12"\n', "entry 1"),
        (f'[[allow]]\nname = "a"\nplan = "{"0" * 64}"\nuntil = "soon"\n', "until"),
        (f'[[allow]]\nname = "a"\nplan = "{"0" * 64}"\nuntill = 2026-12-31\n', "untill"),
    ],
)
def test_a_file_that_is_wrong_allows_nothing_and_the_error_names_what_is(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "allow.toml"
    file.write_text(text)
    with pytest.raises(AllowFileWrong) as wrong:
        read_allowed(file)
    assert str(file) in str(wrong.value)
    assert told in str(wrong.value)


def test_a_file_that_every_user_may_write_to_is_refused(owner: Owner) -> None:
    owner.allow()
    owner.file.chmod(0o666)
    told = owner.refusal()
    assert "chmod o-w allow.toml" in told
    assert "[SL610]" in told


def test_a_plan_whose_code_is_not_there_has_no_entry(owner: Owner) -> None:
    (owner.workspace.folder / "helper.py").unlink()
    (owner.workspace.folder / "model.py").unlink()
    ended = owner.workspace.command("allow", ".")
    assert ended.returncode == ExitCode.REFUSED
    assert "model.py" in ended.stderr
    assert ended.stdout == ""


def test_the_refusal_of_a_plan_without_a_file_prints_the_entry_itself(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script's worker has no plan file that `stageline allow` could read."""
    monkeypatch.chdir(owner.workspace.folder)
    plan = from_mapping(read_plan(owner.workspace.folder).as_mapping())
    with keep_to(owner.file, "worker"), pytest.raises(NoConsent):
        demand_consent(plan)
    owner.file.write_text(capsys.readouterr().err)
    with keep_to(owner.file, "worker"):
        demand_consent(plan)


def test_what_is_opened_before_its_plan_was_compared_is_refused(owner: Owner) -> None:
    owner.allow()
    plan = read_plan(owner.workspace.folder)
    with keep_to(owner.file, "worker"), pytest.raises(NoConsent):
        load_inputs(plan)
    assert not (owner.workspace.folder / "trace").exists()


def test_an_entry_holds_names_and_values_of_any_kind(tmp_path: Path) -> None:
    options = {"folder": 'C:\\scans "ü\x7f\x85\u202e\n', "sizes": [[1, 2.5], []], "deep": {"a b": {"é": True}}}
    tables = {
        "run": {"name": "scans", "steps": 1},
        "model": {"factory": "torch.nn.Identity", "loss": "torch.nn.MSELoss", "stages": 1},
        "data": {"source": "torch.rand", "batch_size": 4, "options": options},
        "optimizer": {"factory": "torch.optim.SGD", "lr": 1e-07},
    }
    plan = from_mapping(tables, file=tmp_path / "stageline.toml")
    file = tmp_path / "allow.toml"
    file.write_text(entry_text(plan, 'An"na\\', None))
    (entry,) = read_allowed(file).allow
    assert entry.asked_by == 'An"na\\'
    assert entry.keys["optimizer.lr"] == 1e-07
    assert not [*entry.faults(plan, {}, date.today())]


def test_a_folder_of_a_plan_that_is_called_like_one_of_libraries_has_code_of_the_user(tmp_path: Path) -> None:
    inside = tmp_path / "site-packages" / "evil.py"
    assert is_own(str(inside), tmp_path)
    assert not is_own(os.__file__, tmp_path)
    assert not is_own(pytest.__file__, tmp_path)
