"""metrics.jsonl of whole runs: one line for each step, with the same values, whatever is killed or laid out again."""

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stageline.workers.runs.metrics import METRICS, StepMetrics, metrics_in
from support.workspace import Command, Workspace, until, wait_for

STEPS = 90
MODEL = """
from time import sleep

from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        sleep(0.004)
        return x

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.LayerNorm(8), Slow(), nn.Tanh(), nn.Linear(8, 2))

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()
"""
SETS = (
    *("--set", f"run.steps={STEPS}", "--set", "optimizer.clip_norm=0.5"),
    *("--set", "recovery.restarts=3", "--set", "recovery.snapshot_every=10"),
    *("--set", "lr_scheduler.factory=torch.optim.lr_scheduler.StepLR", "--set", "lr_scheduler.step_size=40"),
)


def measured(folder: Path) -> list[dict[str, Any]]:
    """The training steps in the folder of a run, without their times, which every run has of its own."""
    lines = [line for line in metrics_in(folder) if isinstance(line, StepMetrics)]
    return [{**msgspec.structs.asdict(line), "time": 0} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, fork_server: Any) -> list[dict[str, Any]]:
    with Workspace(tmp_path_factory.mktemp("undisturbed"), fork_server) as workspace:
        workspace.write("model.py", MODEL.replace("0.004", "0"))
        assert workspace.here("train", ".", *SETS, "--set", "queues.url=memory://") == 0
        return measured(workspace.runs()[0])


def test_a_run_in_one_process_has_a_line_for_each_step(undisturbed: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in undisturbed] == list(range(STEPS))
    assert all(line["loss"] > 0 and line["gradient_norm"] > 0 for line in undisturbed)
    assert {line["rows"] for line in undisturbed} == {6, 2}  # 32 rows in batches of 6
    assert [undisturbed[step]["learning_rates"] for step in (0, 39, 40, 80)] == [
        pytest.approx((rate,)) for rate in (0.1, 0.1, 0.01, 0.001)
    ]  # those that the step was made with


def begin(workspace: Workspace, *arguments: str) -> tuple[Command, Path]:
    train = workspace.start("train", ".", *SETS, *arguments)
    until(train.stderr, "running")
    return train, max(workspace.runs(), key=lambda each: (each / "process.json").stat().st_mtime)


def until_snapshot(folder: Path, stage: int, step: int) -> None:
    snapshots = folder / "checkpoints" / f"stage-{stage}"
    wait_for(lambda: any(int(path.name.removeprefix("step-")) >= step for path in snapshots.glob("step-*")))


@pytest.mark.slow
def test_each_step_has_one_line_when_the_last_worker_is_killed_and_when_all_are_and_the_cut_is_another(
    workspace: Workspace, undisturbed: list[dict[str, Any]]
) -> None:
    workspace.write("model.py", MODEL)
    train, folder = begin(workspace)
    until_snapshot(folder, 1, 20)
    os.kill(workspace.worker(1), signal.SIGKILL)
    until_snapshot(folder, 1, 50)
    workspace.kill()
    train.communicate()
    assert len(measured(folder)) < STEPS
    with (folder / METRICS).open("ab") as file:
        file.write(b'{"kind":"step","st')  # as a kill in the middle of a write leaves it
    resumed = workspace.command("train", ".", "--resume", folder.name, *SETS, "--set", "model.cut=[1, 3]")
    assert resumed.returncode == 0, resumed.stderr
    (other,) = set(workspace.runs()) - {folder}
    assert measured(other) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_each_step_has_one_line_whichever_worker_is_killed(
    workspace: Workspace, undisturbed: list[dict[str, Any]], index: int
) -> None:
    workspace.write("model.py", MODEL)
    train, folder = begin(workspace)
    until_snapshot(folder, 1, 30)
    os.kill(workspace.worker(index), signal.SIGKILL)
    _, errors = train.communicate()
    assert train.returncode == 0, errors
    assert measured(folder) == undisturbed


@pytest.mark.slow
def test_each_step_has_one_line_after_a_stop_and_without_recovery(
    workspace: Workspace, undisturbed: list[dict[str, Any]]
) -> None:
    workspace.write("model.py", MODEL)
    train, folder = begin(workspace)
    until_snapshot(folder, 1, 20)
    train.send_signal(signal.SIGTERM)
    train.communicate()
    assert train.returncode == 75
    assert workspace.command("train", ".", "--resume", *SETS).returncode == 0
    assert measured(folder) == undisturbed
    without = workspace.command("train", ".", *SETS, "--set", "recovery.restarts=0")
    assert without.returncode == 0, without.stderr
    (other,) = set(workspace.runs()) - {folder}
    assert measured(other) == undisturbed
