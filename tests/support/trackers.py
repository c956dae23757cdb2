"""Packages of trackers of experiments, as far as stageline uses them: what they are given is kept in memory."""

import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from stageline.workers.runs.trackers import MlflowRun, WandbRun

PLAN = {"model": {"cut": [1, 2], "factory": "model.py:build"}, "optimizer": {"lr": 0.1}, "data": {"check": False}}
CONFIGURATION = {"model.cut": "[1,2]", "model.factory": "model.py:build", "optimizer.lr": 0.1, "data.check": False}


def run_folder(parent: Path) -> Path:
    """The folder of a run with that plan."""
    run = parent / "digits-1"
    run.mkdir()
    (run / "plan.json").write_text(json.dumps(PLAN))
    return run


def hand_over(sink: WandbRun | MlflowRun, steps: int = 5) -> None:
    """Four steps in a second; the third has no loss, since it had no rows."""
    with sink:
        for step in range(steps):
            sink.add_step(step, None if step == 2 else 0.5, 2.0, [0.1, 0.2], 100.0 + step / 4)
        sink.add_evaluation(5, {"loss": 0.25, "accuracy": None}, 102.0)


class RefusedByTracker(Exception):
    pass


class Wandb(ModuleType):
    """The package, as far as it is used: its runs note what they are given."""

    Error = RefusedByTracker

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.finished = 0
        self.codes: list[int] = []
        self.summary: dict[str, Any] = {}
        self.gone_from: int | None = None  # the step from which on nothing is taken

    def init(self, **settings: Any) -> "Wandb":
        if settings["project"] == "forbidden":
            raise RefusedByTracker("permission denied\nmore")
        self.begun.append(settings)
        if settings["resume"] is None:
            self.summary.clear()
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        if self.gone_from is not None and values["step"] >= self.gone_from:
            raise BrokenPipeError("the service is gone")
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)
        self.finished += 1


class Mlflow:
    """A server of MLflow in memory, and the client of it that stageline uses."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.experiments: dict[str, str] = {}
        self.calls = 0

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> list[SimpleNamespace]:
        key, _, value = filter_string.partition(" = ")
        name = key.removeprefix("tags.`").removesuffix("`")
        return [
            SimpleNamespace(info=SimpleNamespace(run_id=run), data=SimpleNamespace(tags=found["tags"]))
            for run, found in self.runs.items()
            if found["within"] in experiments and found["tags"].get(name) == value.strip("'")
        ][:max_results]

    def create_run(self, within: str, run_name: str | None, tags: dict[str, str]) -> SimpleNamespace:
        run = f"run-{len(self.runs)}"
        self.runs[run] = {"within": within, "tags": dict(tags), "metrics": [], "params": {}, "status": "RUNNING"}
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def update_run(self, run: str, status: str) -> None:
        self.runs[run]["status"] = status

    def set_terminated(self, run: str, status: str) -> None:
        self.runs[run]["status"] = status

    def set_tag(self, run: str, key: str, value: object) -> None:
        self.runs[run]["tags"][key] = str(value)

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        if self.calls == -1:
            raise RefusedByTracker("the server is gone")
        self.calls += 1
        assert len(params) <= 100
        assert len(metrics) <= 1000
        for each in (*metrics, *params):
            if not re.fullmatch(r"[\w\-. /]{1,250}", each.key):
                raise RefusedByTracker(f"Invalid parameter name: {each.key}")
        self.runs[run]["metrics"] += [(each.key, each.value, each.timestamp, each.step) for each in metrics]
        self.runs[run]["params"] |= {each.key: each.value for each in params}


def mlflow_modules(server: Mlflow) -> list[ModuleType]:
    """The modules of a package whose clients ask `server`."""
    entities: Any = ModuleType("mlflow.entities")
    entities.Metric = lambda key, value, timestamp, step: SimpleNamespace(
        key=key, value=value, timestamp=timestamp, step=step
    )
    entities.Param = lambda key, value: SimpleNamespace(key=key, value=value)
    exceptions: Any = ModuleType("mlflow.exceptions")
    exceptions.MlflowException = RefusedByTracker
    package: Any = ModuleType("mlflow")
    package.MlflowClient = lambda uri: server
    return [package, entities, exceptions]
