"""A whole plan in this process."""

from contextlib import closing
from pathlib import Path
from time import time

import pytest

from stageline.broker.control.sqlite_store import SqliteReader
from stageline.broker.coordinator.records import OBSERVED
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import read_plan
from stageline.pipeline.process.steady_clock import SteadyClock
from stageline.workers.process.in_process import run_memory
from stageline.workers.runs.folder import STORE
from stageline.workers.runtime.job import Job, prepare
from support.workspace import MODEL, Workspace


@pytest.fixture(autouse=True)
def in_its_folder(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.folder)


def job(workspace: Workspace, *sets: str) -> Job:
    return prepare(read_plan(workspace.folder, sets=sets))


def test_a_run_ends_with_its_weights_its_losses_and_its_metrics(workspace: Workspace, tmp_path: Path) -> None:
    statuses: list[object] = []
    outcome = run_memory(job(workspace), "run-1", tmp_path, lambda facts: statuses.append(facts["phase"]))
    assert outcome.code == 0
    assert outcome.facts["weights_sha256"]
    assert outcome.facts["metrics"].keys() == {"accuracy"}
    assert "running" in statuses
    assert list(tmp_path.glob("*.safetensors"))


def test_the_records_of_a_run_that_has_ended_say_by_how_much_the_clock_was_set(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are as old as the system's clock says; the last ones of a run left out that it was set an hour ahead."""
    hours = iter([0.0])
    clock = SteadyClock(lambda: time() + next(hours, 3600.0))
    monkeypatch.setattr("stageline.workers.process.in_process.STEADY", clock)
    run_memory(job(workspace), "run-1", tmp_path)
    with closing(SqliteReader(tmp_path / STORE)) as store:
        observed = store.load().facts[OBSERVED]
    assert observed["behind"] == pytest.approx(3600.0, abs=1.0)
    assert observed["at"] == pytest.approx(clock.time(), abs=60.0)


def test_the_bits_do_not_depend_on_how_stages_are_placed(workspace: Workspace, tmp_path: Path) -> None:
    outcomes = [
        run_memory(job(workspace, f"workers.0.stages={stages}", *others), "run-1", tmp_path)
        for stages, others in (("[0,1]", []), ("[0]", ["workers.1.stages=[1]"]))
    ]
    first, second = (outcome.facts["weights_sha256"] for outcome in outcomes)
    assert first == second


def test_an_interrupted_run_saves_nothing(workspace: Workspace, tmp_path: Path) -> None:
    outcome = run_memory(job(workspace), "run-1", tmp_path, interrupted=lambda: True)
    assert (outcome.code, outcome.reason) == (ExitCode.INTERRUPTED, "interrupted, nothing saved")
    assert list(tmp_path.glob("*.safetensors")) == []


def test_a_model_that_raises_ends_the_run_with_its_place(workspace: Workspace, tmp_path: Path) -> None:
    workspace.write("model.py", MODEL + "\ndef loss(outputs, targets):\n    raise KeyError('no such thing')\n")
    outcome = run_memory(job(workspace, "model.loss=model.py:loss"), "run-1", tmp_path)
    assert outcome.code == ExitCode.FAILED
    assert outcome.reason.startswith("stage 1 failed in 1F0 of step 0, the loss: KeyError")
