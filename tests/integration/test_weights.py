"""Workers read their weights from files, and train as the model that is built whole with the same weights."""

import contextlib
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from stageline import Line, ModelRefused, load_weights, read_plan
from stageline.pipeline.errors import ExitCode
from stageline.workers.runs.folder import result_in
from stageline.workers.runs.records import recorded_run
from stageline.workers.runtime.job import prepare
from support.stored_models import allocated, model, trained
from support.workspace import Workspace, wait_for

pytestmark = pytest.mark.usefixtures("one_thread")

WHOLE = """
from pathlib import Path
from safetensors.torch import load_file
from model import accuracy, build

def whole():
    model = build()
    model.load_state_dict(load_file(Path(__file__).parent / "start.safetensors"))
    return model
"""
OPTIONS = {
    "cut": [2, 4],
    "loss": nn.functional.mse_loss,
    "optimizer": partial(torch.optim.AdamW, lr=0.1),
    "microbatches": 2,
    "workers": "inline",
}


def stored(workspace: Workspace) -> Path:
    """Weights of the workspace's model."""
    generator = torch.Generator().manual_seed(5)
    forms = {"0.weight": (8, 4), "0.bias": (8,), "2.weight": (2, 8), "2.bias": (2,)}
    save_file(
        {name: torch.randn(shape, generator=generator) for name, shape in forms.items()},
        workspace.folder / "start.safetensors",
    )
    return workspace.folder / "start.safetensors"


def test_a_line_begins_with_the_weights_in_a_file(tmp_path: Path) -> None:
    torch.save(trained(), tmp_path / "m.pt")
    whole = model()
    whole.load_state_dict(trained())
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with Line(whole, **OPTIONS) as line:
        wanted = [line.step(x, y).item() for _ in range(3)]
    with Line(model, weights=tmp_path / "m.pt", **OPTIONS) as loaded:
        assert [loaded.step(x, y).item() for _ in range(3)] == wanted
    assert loaded.state_dict().keys() == line.state_dict().keys()
    assert all(torch.equal(value, line.state_dict()[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"weights": "nothing.pt"}, r'^weights = ".*nothing.pt", for stage 0: there is no such file'),
        ({"weights": 3}, "^weights = 3: expected the path of a file or folder of weights"),
        ({"settings": {"model.weights": "nothing.pt"}}, r'^weights = ".*nothing.pt", for stage 0: there is no such fi'),
    ],
)
def test_a_line_is_refused_before_anything_runs(options: dict[str, object], told: str) -> None:
    with pytest.raises(ModelRefused, match=told):
        Line(model, **{**OPTIONS, "workers": "processes", **options})


def test_a_worker_builds_its_own_stage_alone(workspace: Workspace) -> None:
    stored(workspace)
    plan = read_plan(workspace.folder, sets=["model.weights=start.safetensors"])
    job = prepare(plan, worker=1)
    assert allocated(job.segments) == 0
    executor = job.executor([1])
    assert allocated(job.segments) == job.segments[1].parameters == 18
    wanted = load_file(workspace.folder / "start.safetensors")
    assert all(torch.equal(value, wanted[name]) for name, value in executor.stages[1].state_dict().items())


@pytest.mark.slow
def test_a_plan_trains_from_weights_that_each_worker_has_at_a_path_of_its_own(workspace: Workspace) -> None:
    whole = load_file(stored(workspace))
    workspace.write("whole.py", WHOLE)
    for index, layer in enumerate("02"):
        part = {name: value for name, value in whole.items() if name.startswith(layer)}
        save_file(part, workspace.folder / f"part-{index}.safetensors")
        assert part
    tables = [f"[workers.{k}]\nstages = [{k}]\nweights = 'part-{k}.safetensors'\n" for k in range(2)]
    text = (workspace.folder / "stageline.toml").read_text()
    assert workspace.here("train", ".", "--set", "model.factory=whole.py:whole") == 0
    workspace.write("stageline.toml", text + "\n".join(tables))
    assert workspace.here("train", ".") == 0
    first, second = map(load_weights, workspace.runs())
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not torch.equal(first["0.weight"], whole["0.weight"])


def test_a_worker_without_its_weights_is_refused_before_it_looks_for_the_broker(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert workspace.here("worker", ".", "--set", "model.weights=nothing.pt") == ExitCode.REFUSED
    assert 'nothing.pt", for stage 0: there is no such file' in capsys.readouterr().err


@pytest.mark.slow
def test_a_worker_that_is_killed_reads_its_files_again_until_there_is_a_checkpoint(workspace: Workspace) -> None:
    file, whole = workspace.folder / "m.pt", model()
    torch.save(trained(), file)
    whole.load_state_dict(trained())
    batches = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(6)]
    with Line(whole, **OPTIONS) as line:
        wanted = [line.step(x, y).item() for x, y in batches]
    processes = {**OPTIONS, "workers": "processes", "settings": {"recovery.snapshot_every": 2}}
    with (
        contextlib.chdir(workspace.folder),
        Line(model, weights=file, folder=workspace.folder / "runs", **processes) as loaded,
    ):
        found = []
        for step, batch in enumerate(batches):
            found.append(loaded.step(*batch).item())
            if step == 0:
                os.kill(worker(workspace, 1), signal.SIGKILL)
            if step == 3:
                wait_for(lambda: complete_checkpoint(workspace) == 4)
                torch.save({name: 2 * value for name, value in trained().items()}, file)
                os.kill(worker(workspace, 1), signal.SIGKILL)
    assert found == wanted
    assert all(torch.equal(value, line.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert result_in(workspace.runs()[0]).restarts == 2


def complete_checkpoint(workspace: Workspace) -> int | None:
    """Its step, as the broker has recorded it."""
    with recorded_run(workspace.runs()[0]) as run:
        return run.complete


def worker(workspace: Workspace, index: int) -> int:
    """Its pid."""
    logs = {pid: (Path("/proc") / str(pid) / "fd" / "2").readlink().name for pid in workspace.processes()}
    return next(pid for pid, log in logs.items() if log == f"worker-{index}.log")


def test_weights_that_do_not_fit_are_refused_by_the_trial(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    state = load_file(stored(workspace))
    del state["2.bias"]
    save_file(state, workspace.folder / "start.safetensors")
    assert workspace.here("train", ".", "--set", "model.weights=start.safetensors") == ExitCode.REFUSED
    assert 'start.safetensors", for stage 1: 2.bias is missing' in capsys.readouterr().err
    assert not [run for run in workspace.runs() if (run / "plan.json").exists()]  # written when a run begins
