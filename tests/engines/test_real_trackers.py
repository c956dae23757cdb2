"""The packages of Weights & Biases and MLflow take a run, without a network."""

import time
from pathlib import Path

import pytest

from stageline.workers.runs.trackers import MlflowRun, WandbRun
from support.trackers import hand_over, run_folder

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]


def test_wandb_writes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    hand_over(WandbRun("p", run_folder(tmp_path), dir=str(tmp_path)))
    (written,) = tmp_path.rglob("run-digits-1.wandb")
    until = time.monotonic() + 60  # a process of the package writes it, also after the run's end
    while written.stat().st_size <= 100 and time.monotonic() < until:
        time.sleep(0.05)
    assert written.stat().st_size > 100


def test_mlflow_keeps_a_run_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder, uri = run_folder(tmp_path), (tmp_path / "kept").as_uri()
    for steps in (5, 7):
        hand_over(MlflowRun("e", folder, uri), steps)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["model.cut"] == "[1,2]"
    found = client.get_metric_history(run.info.run_id, "train/gradient_norm")
    assert [(each.step, each.value) for each in found] == [(step, 2.0) for step in range(7)]
