"""`stageline run show`, `diff` and `rm`: one run by its records, two side by side, and the end of its folder."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import click
import jsonschema
import msgspec
import psutil
import pytest

from stageline.broker.control.records import StepRecord
from stageline.broker.control.sqlite_store import SqliteStore
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import read_plan
from stageline.pipeline.schedule import Action
from stageline.workers.cli.schemas import schema_of
from stageline.workers.runs.owner import read_owner, write_owner
from stageline.workers.runs.removal import RunKept, removable, remove
from support.packed import packed_times
from support.workspace import Workspace

PLAN = read_plan("examples/mlp", sets=["run.steps=6"], environment={}).resolved(2)
PLACES = {"begun": True, "incarnation": 2, "members": [], "checkpoints": {"complete": 4, "newer": [[], []]}}
LOST = {
    "stage": 1,
    "start": 4,
    "finished": 5,
    "begun": [],
    "name": "worker-1",
    "generation": 1,
    "at": 1e9,
    "why": "died",
}
LOSSES = (2.5, 1.25, 0.5, 0.375, 0.25, 0.125)


def _recorded(folder: Path, rate: float, losses: Sequence[float], digest: str, *, lost: int = 0) -> None:
    """The folder of a run that has finished, a step each second, as `train` leaves it."""
    folder.mkdir(parents=True)
    write_owner(folder, PLAN, "train")
    _owned(folder, started=0.0)  # its process is gone
    tables = PLAN.as_mapping()
    (folder / "plan.json").write_text(json.dumps({**tables, "optimizer": {**tables["optimizer"], "lr": rate}}))
    (folder / "batches.json").write_text("{}")
    times = [StepRecord(1, step, packed_times([(Action("U", 1), float(step), step + 0.5)])) for step in range(6)]
    replaced = {"gaps": [], "in_a_row": [], "ever": [(1, lost)]}
    with closing(SqliteStore(folder / "broker.sqlite")) as store:
        store.append([*times, *(StepRecord(0, each.step, b"") for each in times)], dict(enumerate(losses)))
        store.put("registry", {**PLACES, "replacing": replaced, "attempts": [LOST] * lost})
        store.put("outcome", {"phase": "finished", "reason": "all steps are done", "code": 0, "weights_sha256": digest})


@pytest.fixture
def two(workspace: Workspace) -> tuple[str, str]:
    """The ids of two runs; the second learned faster, and lost a worker."""
    runs = workspace.folder / "runs"
    _recorded(runs / "small-1", 0.1, LOSSES, "a1" * 32)
    _recorded(runs / "small-2", 0.3, [2.5, *(loss / 2 for loss in LOSSES[1:])], "b2" * 32, lost=1)
    for at, name in enumerate(("small-1", "small-2")):
        for file in ("plan.json", "process.json"):
            os.utime(runs / name / file, (at + 1e9, at + 1e9))
    return "small-1", "small-2"


def _owned(folder: Path, **changes: object) -> None:
    """Record another process as that of a run."""
    owner = read_owner(folder)
    assert owner is not None
    (folder / "process.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(owner, **changes)))


def _facts(workspace: Workspace, capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    capsys.readouterr()
    assert workspace.here("run", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_shown_with_its_plan_steps_loss_digest_and_lost_workers(workspace, two, capsys):
    facts = _facts(workspace, capsys, "show", two[1])
    jsonschema.validate(facts, schema_of("run-show/1"))
    assert [facts[name] for name in ("run", "loss", "weights_sha256")] == [two[1], 0.0625, "b2" * 32]
    assert (facts["state"], facts["steps"], facts["total"], facts["restarts"]) == ("finished", 6, 6, 1)
    assert [(each["worker"], each["step"], each["repeated"]) for each in facts["losses_of_workers"]] == [
        ("worker-1", 4, 1)
    ]
    assert facts["plan"]["schedule"] == PLAN.schedule.name
    assert facts["step_seconds"] == 1.0
    assert facts["bytes"] == sum(file.stat().st_size for file in (workspace.folder / "runs" / two[1]).rglob("*"))
    assert workspace.here("run", "show", two[1]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "b2" * 32 in shown


def test_a_run_is_named_by_its_id_its_folder_its_plan_or_not_at_all(workspace, two, capsys):
    for words in ((two[1],), (f"runs/{two[1]}",), ("small",), (".",), ()):
        assert _facts(workspace, capsys, "show", *words)["run"] == two[1]
    assert workspace.here("run", "show", "smal") == ExitCode.USAGE
    assert "there is no run smal" in capsys.readouterr().err


def test_two_runs_are_compared_by_plan_losses_and_weights(workspace, two, capsys):
    facts = _facts(workspace, capsys, "diff", *two)
    jsonschema.validate(facts, schema_of("run-diff/1"))
    assert [(each["key"], each["decides"], each["a"], each["b"]) for each in facts["plan"]] == [
        ("optimizer.lr", "weights", 0.1, 0.3)
    ]
    assert (facts["same_weights"], facts["same_data"]) == (False, True)
    losses = facts["losses"]
    assert (losses["compared"], losses["first"]["step"]) == (6, 1)  # the first loss is of the weights at the start
    assert [each["step"] for each in losses["rows"]] == [*range(6)]
    assert workspace.here("run", "diff", *two) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "optimizer.lr" in shown
    assert "step 1" in shown


def test_a_run_and_its_copy_have_no_difference(workspace, two, capsys):
    shutil.copytree(workspace.folder / "runs" / two[0], workspace.folder / "elsewhere" / "small-copy")
    facts = _facts(workspace, capsys, "diff", two[0], "elsewhere/small-copy")
    assert (facts["plan"], facts["same_weights"], facts["losses"]["first"]) == ([], True, None)
    assert workspace.here("run", "diff", two[0], f"runs/{two[0]}") == ExitCode.USAGE
    assert "both" in capsys.readouterr().err


def test_a_run_that_is_over_is_removed_and_what_its_links_name_stays(workspace, two, capsys):
    kept = workspace.folder / "kept"
    kept.mkdir()
    (kept / "weights").write_text("precious")
    folder = workspace.folder / "runs" / two[0]
    (folder / "elsewhere").symlink_to(kept)
    facts = _facts(workspace, capsys, "rm", two[0], "--yes")
    assert [each["run"] for each in facts["removed"]] == [two[0]]
    assert not folder.exists()
    assert (kept / "weights").read_text() == "precious"
    assert [each.name for each in workspace.runs()] == [two[1]]


def test_nothing_is_removed_without_consent_or_if_one_of_the_runs_cannot_be(workspace, two, capsys):
    assert workspace.here("run", "rm", two[0]) == ExitCode.USAGE
    assert "--yes" in capsys.readouterr().err
    assert workspace.here("run", "rm", two[0], "neither", "--yes") == ExitCode.USAGE
    assert workspace.here("run", "rm", ".", "--yes") == ExitCode.USAGE
    assert [each.name for each in workspace.runs()] == list(two)


def test_a_folder_that_is_a_link_is_not_removed(workspace, two, capsys):
    link = workspace.folder / "runs" / "link"
    link.symlink_to(workspace.folder / "runs" / two[0])
    for named in ("link", "runs/link/"):
        assert workspace.here("run", "rm", named, "--yes") == ExitCode.FAILED
        assert f"is a link to {workspace.folder / 'runs' / two[0]}" in capsys.readouterr().err
    assert (workspace.folder / "runs" / two[0] / "plan.json").exists()


def test_a_run_whose_process_is_there_is_not_removed(workspace, two, capsys):
    folder = workspace.folder / "runs" / two[0]
    _owned(folder, pid=os.getpid(), started=psutil.Process().create_time())
    assert workspace.here("run", "rm", two[0], "--yes") == ExitCode.FAILED
    assert f"stageline run stop runs/{two[0]}" in capsys.readouterr().err
    assert (folder / "plan.json").exists()


def test_a_run_that_is_resumed_while_the_question_is_shown_is_not_removed_nor_one_named_beside_it(
    workspace, two, capsys, monkeypatch
):
    folders = [workspace.folder / "runs" / each for each in two]

    def resumed(*_: object) -> bool:
        _owned(folders[1], pid=os.getpid(), started=psutil.Process().create_time())
        return True

    monkeypatch.setattr(click, "confirm", resumed)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert workspace.here("run", "rm", *two) == ExitCode.FAILED
    assert f"run {two[1]} goes on" in capsys.readouterr().err
    assert all((each / "plan.json").exists() for each in folders)


def test_a_run_that_is_resumed_before_its_turn_comes_is_not_removed(workspace, two):
    folder = workspace.folder / "runs" / two[0]
    found = removable(folder)
    _owned(folder, pid=os.getpid(), started=psutil.Process().create_time())
    with pytest.raises(RunKept, match=two[0]):
        remove(found)
    assert (folder / "plan.json").exists()


def test_a_run_that_another_cannot_be_resumed_without_is_not_removed(workspace, two, capsys):
    old, new = (workspace.folder / "runs" / each for each in two)
    (new / "recut.json").write_text(json.dumps({"run": old.name, "step": 4}))
    with closing(SqliteStore(new / "broker.sqlite")) as store:
        store.put("outcome", {"phase": "failed", "reason": "the disk is full", "code": 1})
    assert workspace.here("run", "rm", old.name, "--yes") == ExitCode.FAILED
    assert f"stageline run rm {new}" in capsys.readouterr().err
    assert (old / "plan.json").exists()
    with closing(SqliteStore(new / "broker.sqlite")) as store:
        store.put("registry", {**PLACES, "checkpoints": {"complete": 5, "newer": [[], []]}})
    assert workspace.here("run", "rm", old.name, "--yes") == 0


def test_a_run_that_a_finished_one_has_continued_is_removed(workspace, two):
    old, new = (workspace.folder / "runs" / each for each in two)
    (new / "recut.json").write_text(json.dumps({"run": old.name, "step": 4}))
    assert workspace.here("run", "rm", old.name, "--yes") == 0


def test_a_run_of_another_machine_without_an_end_is_not_removed(workspace, two, capsys):
    folder = workspace.folder / "runs" / two[0]
    _owned(folder, host="desk-9")
    (folder / "broker.sqlite").unlink()
    assert workspace.here("run", "rm", two[0], "--yes") == ExitCode.FAILED
    assert "give the command on desk-9" in capsys.readouterr().err
    assert (folder / "plan.json").exists()


def test_a_removal_that_was_interrupted_is_repeated(workspace, two, capsys, monkeypatch):
    folder = workspace.folder / "runs" / two[0]
    (folder / "checkpoints" / "stage-0").mkdir(parents=True)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        assert workspace.here("run", "rm", two[0], "--yes") == ExitCode.INTERRUPTED
    assert [row["run"] for row in _facts(workspace, capsys, "ls")["runs"]] == [two[1]]  # no command takes it for a run
    assert folder.exists()
    assert workspace.here("run", "rm", two[0], "--yes") == 0
    assert not folder.exists()


def test_a_run_whose_records_are_damaged_can_be_removed(workspace, two):
    folder = workspace.folder / "runs" / two[0]
    (folder / "broker.sqlite").write_bytes(b"no database" * 100)
    assert workspace.here("run", "rm", two[0], "--yes") == 0
    assert not folder.exists()
