"""A whole plan in this process."""

from pathlib import Path

import pytest

from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import read_plan
from stageline.workers.process.in_process import run_memory
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
