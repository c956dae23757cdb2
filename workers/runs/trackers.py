"""Trackers of experiments, which keep the measurements of many runs side by side: Weights & Biases, and MLflow.

Both get the names that TensorBoard gets, by the step as x axis: "train/loss", "train/gradient_norm",
"train/learning_rate/0", "evaluation/accuracy", and also "train/steps_per_second"; and as its configuration the run's
plan, without secrets: no password of an address, and no setting that is named like one. Nothing is sent anywhere but
where their own settings say.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from time import time as now
from typing import Any, Protocol

import msgspec

from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import StagelineError
from stageline.pipeline.printable import bounded

from .folder import PLAN
from .packages import imported
from .scrub import Scrub, is_secret_name

LEAST_SPAN = 1.0  # seconds over which steps per second are measured
BATCH = 200  # values that MLflow gets at a time
LONGEST, LONGEST_KEY = 500, 250  # characters of a value of the configuration, and of a name at MLflow
_STEP = "step"  # x axis
_RUN, _TRAINED, _EVALUATED = "stageline.run", "stageline.trained", "stageline.evaluated"  # tags of a run there
_FOREIGN = re.compile(r"[^\w\-. /]", re.ASCII)  # what a name at MLflow may not have on any system
_SCRUB = Scrub()


class RunEnd(StrEnum):
    """State in which a run is left at a tracker, in MLflow's words."""

    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"  # stopped on request, or its process is gone
    RUNNING = "RUNNING"  # it goes on, or its end is not known


_EXITS = {RunEnd.FINISHED: 0, RunEnd.FAILED: 1, RunEnd.KILLED: 255, RunEnd.RUNNING: 255}  # for Weights & Biases


class TrackerFailed(StagelineError):
    """Error that a tracker of experiments does not take a run.

    Mend: See to what the tracker says: its address, its login, or its version.

    Example: MLflow does not take the run: API request to http://tracking:5000 failed
    """

    error_code = "SL518"


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Return a context that raises `TrackerFailed` for any failure of the package of the tracker `name`."""
    try:
        yield
    except Exception as error:
        raise TrackerFailed(f"{name} does not take the run: {bounded(str(error).partition(chr(10))[0])}") from error


class Sink(Protocol):
    """Place to which a run's measurements are handed, in the order of training."""

    def add_step(
        self,
        step: int,
        loss: float | None,
        gradient_norm: float | None = None,
        learning_rates: Iterable[float] = (),
        time: float | None = None,
    ) -> None:
        """Add a training step; `time` is in seconds since the epoch, None for now."""

    def add_evaluation(self, step: int, values: Mapping[str, float | None], time: float | None = None) -> None:
        """Add an evaluation after `step` training steps; `time` as in `add_step`."""

    def flush(self) -> None:
        """Hand over all that was added."""

    def end(self, *, failed: bool = False) -> None:
        """Hand over all that was added, and close the sink; `failed` if what was measured has failed."""


def configuration(folder: Path | None) -> dict[str, str | int | float | bool]:
    """Return the plan of the run in `folder` by keys such as "optimizer.lr"; empty without a folder or a plan.

    Trackers keep it on machines of others: settings with the name of a secret, such as "data.options.token", are left
    out, and so are passwords in addresses and texts that look like keys.
    """
    try:
        plan = {} if folder is None else msgspec.json.decode((folder / PLAN).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}
    return dict(_flat(plan))


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    for key, value in tables.items():
        if is_secret_name(key):
            continue
        match value:
            case Mapping():
                yield from _flat(value, f"{prefix}{_bare(key)}.")
            case bool() | int() | float():
                yield f"{prefix}{_bare(key)}", value
            case _:
                told = _without_secrets(value)
                text = told if isinstance(told, str) else msgspec.json.encode(told).decode()
                yield f"{prefix}{_bare(key)}", text[:LONGEST]


def _bare(text: str) -> str:
    return _SCRUB.text(masked(text))


def _without_secrets(value: object) -> object:
    match value:
        case str():
            return _bare(value)
        case Mapping():
            kept = {str(name): each for name, each in value.items() if not is_secret_name(str(name))}
            return {_bare(name): _without_secrets(each) for name, each in kept.items()}
        case list() | tuple():
            return [_without_secrets(each) for each in value]
        case _:
            return value


class _Tracker(AbstractContextManager["_Tracker"], ABC):
    """Sink that names values, takes each step once, and measures steps per second by the times of the steps."""

    def __init__(self) -> None:
        self._since: tuple[int, float] | None = None  # a step, and when it was
        self._newest = {"train": -1, "evaluation": -1}

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the run, which has failed if an exception ends the context."""
        self.end(failed=kind is not None)

    def end(self, *, failed: bool = False) -> None:
        """Hand over all that was added, and end the run."""
        self.leave(RunEnd.FAILED if failed else RunEnd.FINISHED)

    @abstractmethod
    def leave(self, state: RunEnd) -> None:
        """Hand over all that was added, and leave the run in `state`."""

    def add_step(
        self,
        step: int,
        loss: float | None,
        gradient_norm: float | None = None,
        learning_rates: Iterable[float] = (),
        time: float | None = None,
    ) -> None:
        """Add a training step; `time` is in seconds since the epoch, None for now."""
        time = now() if time is None else time
        rates = {f"learning_rate/{group}": rate for group, rate in enumerate(learning_rates)}
        pace = self._steps_per_second(step, time)
        values = {"loss": loss, "gradient_norm": gradient_norm, "steps_per_second": pace, **rates}
        self._put("train", step, values, time)

    def add_evaluation(self, step: int, values: Mapping[str, float | None], time: float | None = None) -> None:
        """Add an evaluation after `step` training steps; `time` as in `add_step`."""
        self._put("evaluation", step, values, now() if time is None else time)

    def flush(self) -> None:
        """Hand over all that was added."""

    def _put(self, part: str, step: int, values: Mapping[str, float | None], time: float) -> None:
        if step <= self._newest[part]:
            return
        self._newest[part] = step
        found = {f"{part}/{name}": value for name, value in values.items() if value is not None}
        if found:
            self._log(step, found, time)

    @abstractmethod
    def _log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Take values by name."""

    def _steps_per_second(self, step: int, time: float) -> float | None:
        """Return the pace since the last time that this returned one; None before `LEAST_SPAN` seconds are over."""
        if self._since is None or step <= self._since[0] or time < self._since[1]:
            self._since = step, time
            return None
        steps, seconds = step - self._since[0], time - self._since[1]
        if seconds < LEAST_SPAN:
            return None
        self._since = step, time
        return steps / seconds


class WandbRun(_Tracker):
    """Run of Weights & Biases, with the id of the run of stageline.

    Its summary has the newest steps, which a resumed run does not add again; without the server (offline) it does.
    It knows no run that is open without a process: one that goes on is "killed" there, until it is handed over again.
    Its own settings decide where the data goes: `WANDB_MODE=offline` keeps it on this machine.
    """

    def __init__(self, project: str, folder: Path | None, *, goes_on: bool = False, **settings: object) -> None:
        """Begin the run.

        Args:
            project: Name of the project.
            folder: Folder of the run; None without one.
            goes_on: Add to what the run has there; else it is written from the beginning.
            **settings: Further arguments of `wandb.init`.

        Raises:
            ExporterMissing: The package is not installed.
            TrackerFailed: Weights & Biases does not take the run.
        """
        super().__init__()
        wandb = imported("wandb", "wandb", "Weights & Biases")
        self._telling = partial(_told, "Weights & Biases")
        name = None if folder is None else folder.resolve().name
        known = {"id": name, "name": name, "resume": "allow" if goes_on else None, "config": configuration(folder)}
        with self._telling():
            self._run: Any = wandb.init(project=project, **{**known, **settings})
            self._run.define_metric(_STEP)
            self._run.define_metric("*", step_metric=_STEP)
            if goes_on:
                kept = self._run.summary
                self._newest = {"train": int(kept.get(_TRAINED, -1)), "evaluation": int(kept.get(_EVALUATED, -1))}

    def leave(self, state: RunEnd) -> None:
        """Hand over all that was added, and leave the run in `state`."""
        with self._telling():
            self._run.finish(exit_code=_EXITS[state])

    def _log(self, step: int, values: Mapping[str, float], time: float) -> None:
        with self._telling():
            self._run.log({_STEP: step, **values})
            self._run.summary.update({_TRAINED: self._newest["train"], _EVALUATED: self._newest["evaluation"]})


class MlflowRun(_Tracker):
    """Run of MLflow, found again by the id of the run of stageline: values that it has are not added again."""

    def __init__(self, experiment: str, folder: Path | None, uri: str | None = None) -> None:
        """Begin the run, or take it up.

        Args:
            experiment: Name of the experiment, which is made if it is not there.
            folder: Folder of the run; None without one: then the run is always a new one.
            uri: Where MLflow keeps runs; None for `MLFLOW_TRACKING_URI`, or what MLflow does without that.

        Raises:
            ExporterMissing: The package is not installed.
            TrackerFailed: MLflow does not take the run.
        """
        super().__init__()
        imported("mlflow.exceptions", "mlflow", "MLflow")
        self._telling = partial(_told, "MLflow")
        self._entities: Any = imported("mlflow.entities", "mlflow", "MLflow")
        self._metrics: list[Any] = []
        with self._telling():
            self._client: Any = imported("mlflow", "mlflow", "MLflow").MlflowClient(uri)
            self._run = self._opened(experiment, folder)

    def _opened(self, experiment: str, folder: Path | None) -> str:
        """Return the id of the run at MLflow, which is made unless it is there."""
        name = None if folder is None else folder.resolve().name
        kept = self._client.get_experiment_by_name(experiment)
        within = self._client.create_experiment(experiment) if kept is None else kept.experiment_id
        found = [] if name is None else self._client.search_runs([within], f"tags.`{_RUN}` = '{name}'", max_results=1)
        if found:
            run, tags = str(found[0].info.run_id), found[0].data.tags
            self._client.update_run(run, status="RUNNING")
            self._newest = {"train": int(tags.get(_TRAINED, -1)), "evaluation": int(tags.get(_EVALUATED, -1))}
            return run
        tags = {} if name is None else {_RUN: name}
        run = str(self._client.create_run(within, run_name=name, tags=tags).info.run_id)
        named = {_mlflow_name(key): str(value) for key, value in configuration(folder).items()}
        parameters = [self._entities.Param(key, value) for key, value in named.items()]
        for first in range(0, len(parameters), 100):  # the most at a time
            self._client.log_batch(run, params=parameters[first : first + 100])
        return run

    def leave(self, state: RunEnd) -> None:
        """Hand over all that was added, and leave the run in `state`."""
        self.flush()
        with self._telling():
            if state is not RunEnd.RUNNING:
                self._client.set_terminated(self._run, str(state))

    def flush(self) -> None:
        """Hand over all that was added."""
        added, self._metrics = self._metrics, []
        with self._telling():
            for first in range(0, len(added), BATCH):
                self._client.log_batch(self._run, metrics=added[first : first + BATCH])
            if added:
                self._client.set_tag(self._run, _TRAINED, self._newest["train"])
                self._client.set_tag(self._run, _EVALUATED, self._newest["evaluation"])

    def _log(self, step: int, values: Mapping[str, float], time: float) -> None:
        at = int(1000 * time)
        self._metrics += [self._entities.Metric(_mlflow_name(name), value, at, step) for name, value in values.items()]
        if len(self._metrics) >= BATCH:
            self.flush()


def _mlflow_name(key: str) -> str:
    """Return a name that MLflow takes: of other characters than letters, digits and "_-. /", underscores are left."""
    return _FOREIGN.sub("_", key)[:LONGEST_KEY]
