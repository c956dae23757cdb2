"""The callbacks of trackers: a fit hands its losses and evaluations over, under the id of its run."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from stageline import Callback, Line, MLflow, WandB
from stageline.workers.runs.packages import ExporterMissing
from stageline.workers.script.calls.calls import StepLoss
from support.trackers import Mlflow, Wandb, mlflow_modules


class AtFolder:
    """A line whose run has a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.position = folder, 0


class Notes(Callback):
    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_begin(self, line) -> None:
        self.seen.append(("begin", line.position, line.folder))

    def on_step(self, step: int, loss: StepLoss) -> None:
        self.seen.append(step)


def fit(*callbacks: Callback) -> list[torch.Tensor]:
    torch.manual_seed(0)
    batches = [(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))] * 4
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer, loss = partial(torch.optim.SGD, lr=0.1), nn.functional.cross_entropy
    with Line(model, loss=loss, optimizer=optimizer, workers="inline", microbatches=2) as line:
        line.fit(batches, held_out=batches[:1], evaluate_every=4, callbacks=callbacks)
        return list(line.state_dict().values())


def test_a_fit_is_handed_to_wandb_and_ends_there(monkeypatch: pytest.MonkeyPatch):
    wandb, notes = Wandb(), Notes()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    fit(notes, WandB("p", tags=["a"]))
    assert notes.seen == [("begin", 0, None), 0, 1, 2, 3]
    assert [each["step"] for each in wandb.logged if "train/loss" in each] == [0, 1, 2, 3]
    assert [each["step"] for each in wandb.logged if "evaluation/loss" in each] == [4]
    assert (wandb.begun[0]["project"], wandb.begun[0]["tags"], wandb.finished) == ("p", ["a"], 1)


def test_a_run_with_a_folder_has_its_name_and_plan_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = Mlflow()
    for module in mlflow_modules(server):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "plan.json").write_text(json.dumps({"optimizer": {"lr": 0.1}}))
    for steps, ended in ((3, None), (5, object())):  # the second process resumes
        callback = MLflow("e")
        callback.on_begin(AtFolder(tmp_path))
        for step in range(1, steps):
            callback.on_step(step, StepLoss(lambda: (0.5, 2.0)))
        callback.on_end(ended)  # type: ignore[arg-type]
    ((run),) = server.runs.values()
    assert (run["tags"]["stageline.run"], run["params"], run["status"]) == (
        tmp_path.name, {"optimizer.lr": "0.1"}, "FINISHED",
    )  # fmt: skip
    assert [step for key, _, _, step in run["metrics"] if key == "train/loss"] == [1, 2, 3, 4]


def test_a_tracker_that_fails_in_a_fit_is_told_once_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    wandb.gone_from = 1
    weights, alone = fit(WandB("p")), fit()
    assert all(map(torch.equal, weights, alone))
    told = [line for line in capsys.readouterr().err.splitlines() if "the service is gone" in line]
    assert len(told) == 1
    assert "the fit goes on" in told[0]
    assert [each["step"] for each in wandb.logged] == [0]


def test_a_package_that_is_missing_is_missed_before_the_fit(monkeypatch: pytest.MonkeyPatch):
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    for make in (WandB, MLflow):
        with pytest.raises(ExporterMissing):
            make("p")
