"""A fit's scalars in event files, as TensorBoard reads them."""

import sys
from pathlib import Path
from typing import Any

import pytest

from stageline.workers.runs.tensorboard import EventFile, TensorBoardMissing
from stageline.workers.script.callbacks import TensorBoard
from stageline.workers.script.calls.calls import StepLoss


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events: Any = reader.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def train(callback: TensorBoard, *steps: int) -> None:
    for step in steps:
        callback.on_step(step, StepLoss(lambda: (0.5, 2.0)))
    callback.on_evaluation(steps[-1] + 1, {"loss": 0.25, "accuracy": None})
    callback.on_end(None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_steps_and_evaluations_are_scalars_each_once_also_after_a_resume(tmp_path: Path):
    train(TensorBoard(tmp_path), 0, 1, 2, 3)
    train(TensorBoard(tmp_path), 2, 3, 4)
    assert scalars(tmp_path) == {
        "train/loss": [(step, 0.5) for step in range(5)],
        "train/gradient_norm": [(step, 2.0) for step in range(5)],
        "evaluation/loss": [(5, 0.25)],
    }


def test_without_the_package_the_command_to_install_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TensorBoardMissing, match=r'pip install "stageline\[tensorboard\]"'):
        TensorBoard(tmp_path)
    with pytest.raises(TensorBoardMissing):
        EventFile(tmp_path, 0)
