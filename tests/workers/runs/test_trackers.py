"""Measurements handed to Weights & Biases and to MLflow, by the calls that the packages document."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stageline.workers.runs.packages import ExporterMissing
from stageline.workers.runs.trackers import MlflowRun, Sink, TrackerFailed, WandbRun, configuration
from support.trackers import CONFIGURATION, Mlflow, Wandb, hand_over, mlflow_modules, run_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run_folder(tmp_path)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    made = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def test_wandb_gets_every_value_by_its_step_and_the_plan(folder: Path, wandb: Wandb):
    hand_over(WandbRun("p", folder, tags=["a"]))
    assert wandb.begun == [
        {"project": "p", "id": "digits-1", "name": "digits-1", "resume": None, "config": CONFIGURATION, "tags": ["a"]}
    ]
    assert wandb.axes == [("step", None), ("*", "step")]
    rates = {"train/learning_rate/0": 0.1, "train/learning_rate/1": 0.2, "train/gradient_norm": 2.0}
    assert wandb.logged == [
        {"step": 0, "train/loss": 0.5, **rates},
        {"step": 1, "train/loss": 0.5, **rates},
        {"step": 2, **rates},
        {"step": 3, "train/loss": 0.5, **rates},
        {"step": 4, "train/loss": 0.5, "train/steps_per_second": 4.0, **rates},
        {"step": 5, "evaluation/loss": 0.25},
    ]
    assert wandb.finished == 1


def test_wandb_goes_on_with_a_run_that_is_resumed(folder: Path, wandb: Wandb):
    hand_over(WandbRun("p", folder, goes_on=True))
    hand_over(WandbRun("p", None, mode="offline"))
    assert [(each["id"], each["resume"], each.get("mode")) for each in wandb.begun] == [
        ("digits-1", "allow", None), (None, None, "offline"),
    ]  # fmt: skip


def test_wandb_gets_each_step_once_though_a_resumed_run_repeats_some(folder: Path, wandb: Wandb):
    for steps in (4, 6):
        hand_over(WandbRun("p", folder, goes_on=True), steps)
    assert [each["step"] for each in wandb.logged if "train/gradient_norm" in each] == list(range(6))
    assert [each["step"] for each in wandb.logged if "evaluation/loss" in each] == [5]


def test_what_a_tracker_refuses_is_one_sentence(folder: Path, wandb: Wandb):
    with pytest.raises(TrackerFailed, match=r"Weights & Biases does not take the run: permission denied"):
        WandbRun("forbidden", folder)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Mlflow:
    server = Mlflow()
    for each in mlflow_modules(server):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return server


def series(server: Mlflow, name: str) -> list[tuple[int, float]]:
    (found,) = server.runs.values()
    return [(step, value) for key, value, _, step in found["metrics"] if key == name]


def test_mlflow_gets_every_value_by_its_step_and_time_and_the_plan(folder: Path, mlflow: Mlflow):
    hand_over(MlflowRun("e", folder))
    (run,) = mlflow.runs.values()
    assert run["params"] == {key: str(value) for key, value in CONFIGURATION.items()}
    assert run["status"] == "FINISHED"
    assert series(mlflow, "train/loss") == [(0, 0.5), (1, 0.5), (3, 0.5), (4, 0.5)]
    assert series(mlflow, "train/steps_per_second") == [(4, 4.0)]
    assert series(mlflow, "evaluation/loss") == [(5, 0.25)]
    assert ("train/gradient_norm", 2.0, 100_500, 2) in run["metrics"]


def test_mlflow_has_each_step_once_however_often_a_run_is_handed_over(folder: Path, mlflow: Mlflow):
    for steps in (5, 4, 7):
        hand_over(MlflowRun("e", folder), steps)
    assert [step for step, _ in series(mlflow, "train/gradient_norm")] == list(range(7))
    assert series(mlflow, "evaluation/loss") == [(5, 0.25)]


def test_mlflow_is_asked_seldom(folder: Path, mlflow: Mlflow):
    with MlflowRun("e", folder) as sink:
        for step in range(1000):
            sink.add_step(step, 0.5, None, (), 100.0)
    assert mlflow.calls <= 1 + 1000 / 200


def test_names_that_mlflow_does_not_take_are_cleaned(folder: Path, mlflow: Mlflow):
    (folder / "plan.json").write_text('{"model": {"options": {"taux d\'é=1": 2}}}')
    with MlflowRun("e", folder) as sink:
        sink.add_evaluation(1, {"f1@5": 0.5}, 1.0)
    ((run),) = mlflow.runs.values()
    assert run["params"] == {"model.options.taux d___1": "2"}
    assert series(mlflow, "evaluation/f1_5") == [(1, 0.5)]


def test_a_run_that_fails_is_failed_there(folder: Path, mlflow: Mlflow):
    with pytest.raises(KeyError), MlflowRun("e", folder):
        raise KeyError
    assert [run["status"] for run in mlflow.runs.values()] == ["FAILED"]


def test_a_server_that_is_gone_is_told(folder: Path, mlflow: Mlflow):
    sink = MlflowRun("e", folder)
    mlflow.calls = -1
    sink.add_step(0, 0.5)
    with pytest.raises(TrackerFailed, match="the server is gone"):
        sink.flush()


def test_a_run_without_a_plan_has_no_configuration(tmp_path: Path):
    assert configuration(None) == configuration(tmp_path) == {}
    (tmp_path / "plan.json").write_text("{")
    assert configuration(tmp_path) == {}


def test_the_configuration_has_no_secrets(tmp_path: Path):
    options = {
        "url": "postgres://u:hunter22@h/db?sslpassword=hunter22", "token": "hunter22", "api_key": ["hunter22"],
        "dsn": "host=h password=hunter22 user=u", "urls": ["redis://:hunter22@h:1/0", {"secret": "hunter22", "n": 1}],
        "nested": {"password": 5, "rows": 5}, "hub": "hf_hunter22hunter22hunter22",
    }  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps({"data": {"options": options}}))
    found = configuration(tmp_path)
    assert "hunter22" not in json.dumps(found)
    assert found["data.options.url"] == "postgres://u@h/db"
    assert found["data.options.nested.rows"] == 5
    assert found.keys() == {f"data.options.{name}" for name in ("url", "dsn", "urls", "nested.rows", "hub")}
    assert json.loads(str(found["data.options.urls"])) == ["redis://h:1/0", {"n": 1}]


@pytest.mark.parametrize(("module", "open_sink"), [("wandb", WandbRun), ("mlflow.exceptions", MlflowRun)])
def test_without_the_package_the_command_to_install_it_is_named(
    module: str, open_sink: Callable[..., Sink], folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ExporterMissing, match=rf'pip install "stageline\[{module.partition(".")[0]}\]"'):
        open_sink("p", folder)
