"""Callbacks of `Line.fit`, its options, and its result."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from torch.optim.lr_scheduler import ReduceLROnPlateau

from stageline.pipeline.evaluation import Better, Criterion, Score
from stageline.workers.runs.packages import imported
from stageline.workers.runs.tensorboard import EventFile, writer_class
from stageline.workers.runs.trackers import MlflowRun, Sink, TrackerFailed, WandbRun
from stageline.workers.script.calls.calls import StepLoss
from stageline.workers.script.calls.news import say

from .arguments import LineOptions
from .checks import short
from .fit_batches import FitBatches

BetterName = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Fitted:
    """Result of `Line.fit`.

    Attributes:
        steps: Number of steps of the line at the end.
        loss: Loss of the last step; None if it had no rows, or if this fit had nothing left to train.
        reason: Why the fit ended, as a sentence.
        stopped_early: True if `patience` ended the fit.
        evaluations: Values by name, by step.
        best: Best evaluation; None if no evaluation found a finite number.
    """

    steps: int
    loss: float | None
    reason: str
    stopped_early: bool = False
    evaluations: Mapping[int, Mapping[str, float | None]] = field(default_factory=dict)
    best: Score | None = None


class FittedLine(Protocol):
    """Line that a fit trains."""

    @property
    def folder(self) -> Path | None:
        """Folder of the run; None inline."""

    @property
    def position(self) -> int:
        """Number of training steps called so far."""


class Callback:
    """Base class for objects that follow `Line.fit`: derive from it and override the methods needed.

    An exception from a method ends the fit, as it does in the body of a loop.

    Example:
        class Print(Callback):
            def on_step(self, step, loss):
                print(step, loss.item())

        line.fit(loader, epochs=2, callbacks=[Print()])
    """

    def on_begin(self, line: FittedLine) -> None:
        """Handle the beginning of the fit, before its first step, at `line.position`; `line.folder` is the run's."""

    def on_step(self, step: int, loss: StepLoss) -> None:
        """Handle the loss of step `step`, counted from 0; the loss is known, reading it does not wait.

        Steps arrive in order. Two later steps are already under way, unless an evaluation or the end follows `step`.
        """

    def on_evaluation(self, step: int, found: Mapping[str, float | None]) -> None:
        """Handle an evaluation after `step` steps; `found` has "loss" and the metrics.

        `on_step` has been called for all steps before it.
        """

    def on_best(self, step: int, value: float) -> None:
        """Handle a new best `value`, after `step` steps. If the fit keeps the best checkpoint, it is on the disk."""

    def on_end(self, fitted: Fitted | None) -> None:
        """Handle the end of the fit; `fitted` is None if an error ended it."""


@contextmanager
def named(callback: Callback, method: str, step: int | None = None) -> Iterator[None]:
    """Return a context that adds a note to each exception: the callback's class, its method, and the step.

    Args:
        callback: Callback that is called.
        method: Name of the called method.
        step: Step that the call is about; None if it is about none.
    """
    try:
        yield
    except BaseException as error:
        of = "" if step is None else f" of step {step}"
        error.add_note(f"raised by {type(callback).__name__}.{method}{of}, a callback of Line.fit")
        raise


class SinkCallback(Callback):
    """Callback that hands losses, gradient norms and evaluations to a sink, which is opened with the first of them.

    A tracker that cannot be opened ends the fit. One that fails later does not: this is told once, and nothing more is
    handed to it.
    """

    def __init__(self) -> None:
        """Start without a sink."""
        self._line: FittedLine | None = None
        self._sink: Sink | None = None
        self._failed = False

    def open_sink(self, folder: Path | None, step: int) -> Sink:
        """Return the sink.

        Args:
            folder: Folder of the run; None without one.
            step: Step that comes first.
        """
        raise NotImplementedError

    def on_begin(self, line: FittedLine) -> None:
        """Note the line, whose folder the sink may want."""
        self._line = line

    def on_step(self, step: int, loss: StepLoss) -> None:
        """Hand over the loss and the gradient norm."""
        self._hand(step, lambda sink: sink.add_step(step, loss.item(), loss.gradient_norm))

    def on_evaluation(self, step: int, found: Mapping[str, float | None]) -> None:
        """Hand over the evaluation, and all before it."""
        self._hand(step, lambda sink: sink.add_evaluation(step, found))
        self._hand(step, lambda sink: sink.flush())

    def on_end(self, fitted: Fitted | None) -> None:
        """Close the sink."""
        if self._sink is not None:
            self._hand(0, lambda sink: sink.end(failed=fitted is None))
        self._sink, self._failed = None, False

    def _hand(self, step: int, give: Callable[[Sink], None]) -> None:
        """Give something to the sink, which is opened if need be, unless the tracker has failed before."""
        if self._failed:
            return
        if self._sink is None:
            self._sink = self.open_sink(None if self._line is None else self._line.folder, step)
        try:
            give(self._sink)
        except TrackerFailed as error:
            self._failed = True
            say(f"warning: {error}; the fit goes on, and hands nothing more to it")


class TensorBoard(SinkCallback):
    """Callback that writes losses, gradient norms and evaluations to TensorBoard event files in `folder`.

    On a resumed line, entries of an earlier process from the first step of this one on are replaced. Raises
    `TensorBoardMissing`.

    Example:
        line.fit(loader, epochs=2, callbacks=[TensorBoard("events")])
    """

    def __init__(self, folder: str | Path) -> None:
        """Name the folder; raise `TensorBoardMissing` at once if the package is not installed."""
        super().__init__()
        self._folder = Path(folder)
        writer_class()  # it is missed at once

    def open_sink(self, folder: Path | None, step: int) -> Sink:
        """Open an event file."""
        return EventFile(self._folder, step)


class WandB(SinkCallback):
    """Callback that hands losses, gradient norms, steps per second, evaluations and the plan to Weights & Biases.

    The run there has the id of the run of stageline, and is continued on a resumed line. The package's own settings say
    where the data goes: with `WANDB_MODE=offline` in the environment, it stays on this machine. Raises
    `ExporterMissing`.

    Example:
        line.fit(loader, epochs=2, callbacks=[WandB("digits")])
    """

    def __init__(self, project: str, **settings: object) -> None:
        """Name the project.

        Args:
            project: Name of the project.
            **settings: Further arguments of `wandb.init`, such as `tags` or `mode`.
        """
        super().__init__()
        imported("wandb", "wandb", "WandB")  # it is missed at once
        self._project, self._settings = project, settings

    def open_sink(self, folder: Path | None, step: int) -> Sink:
        """Begin the run, or continue it."""
        return WandbRun(self._project, folder, goes_on=step > 0, **self._settings)


class MLflow(SinkCallback):
    """Callback that hands losses, gradient norms, steps per second, evaluations and the plan to MLflow.

    The run there is found by the id of the run of stageline, and is continued on a resumed line. Raises
    `ExporterMissing`.

    Example:
        line.fit(loader, epochs=2, callbacks=[MLflow("digits", uri="http://tracking:5000")])
    """

    def __init__(self, experiment: str, uri: str | None = None) -> None:
        """Name the experiment, and where MLflow keeps runs; None for `MLFLOW_TRACKING_URI`."""
        super().__init__()
        imported("mlflow", "mlflow", "MLflow")  # it is missed at once
        self._experiment, self._uri = experiment, uri

    def open_sink(self, folder: Path | None, step: int) -> Sink:
        """Begin the run, or continue it."""
        return MlflowRun(self._experiment, folder, self._uri)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """Arguments of `Line.fit`, which documents each."""

    epochs: int | None = None
    steps: int | None = None
    held_out: FitBatches | None = None
    evaluate_every: int | None = None
    metric: str = "loss"
    better: BetterName | None = None
    patience: int | None = None
    best: str | Path | None = None
    callbacks: Sequence[Callback] = ()

    @property
    def criterion(self) -> Criterion:
        """Criterion that compares evaluations."""
        return Criterion(self.metric, Better(self.better or Better.LOWER), self.patience)


def demand_fit(options: FitOptions, line: LineOptions, cannot_save: str) -> None:
    """Raise `ValueError` if an option is unusable; the error names the argument, its value and the expected values.

    Args:
        options: Options of the fit.
        line: Arguments of the line.
        cannot_save: Why the line saves no checkpoint; "" if it does.
    """
    if wrong := next(_complaints(options, line, cannot_save), None):
        raise ValueError(wrong)


def _complaints(options: FitOptions, line: LineOptions, cannot_save: str) -> Iterator[str]:
    metrics = ["loss", *line.named_metrics]
    for name in ("epochs", "steps", "evaluate_every", "patience"):
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            epoch = ', "epoch"' if name == "evaluate_every" else ""
            yield f"{name} = {value!r}: expected a whole number of at least 1{epoch}, or None"
    if options.metric not in metrics:
        yield f"metric = {options.metric!r}: this line measures {', '.join(metrics)}; see metrics= of Line"
    if options.better not in (None, *Better):
        yield f'better = {options.better!r}: expected "lower" or "higher"'
    if options.better is None and options.metric != "loss":
        yield f'metric = {options.metric!r}: pass better="higher" or better="lower", whichever is the better one'
    direction = _plateau_mode(line.lr_scheduler)
    if line.follows("evaluation") and (wrong := options.criterion.better.contradiction(direction, options.metric)):
        yield f"lr_scheduler: {wrong}"
    if options.evaluate_every is None:
        if line.follows("evaluation"):
            yield 'lr_every = "evaluation": say after how many steps to evaluate, with evaluate_every='
        for name in ("held_out", "patience", "best"):
            if getattr(options, name) is not None:
                given = short(getattr(options, name))
                yield f"{name} = {given}: say after how many steps to evaluate, with evaluate_every="
    elif options.held_out is None:
        yield "evaluate_every= is given, and there is nothing to evaluate; pass held_out="
    elif isinstance(options.held_out, Iterator):
        yield (
            f"held_out = {short(options.held_out)} can be walked once, and is evaluated again and again: pass a list "
            "or a loader"
        )
    best: object = options.best
    if not isinstance(best, str | Path | None):
        yield f'best = {short(best)}: expected a path, such as best="best"'
    if options.best is not None and cannot_save:
        yield f'best = "{options.best}": {cannot_save}'
    callbacks: object = options.callbacks
    if not isinstance(callbacks, Sequence):
        yield f"callbacks = {short(callbacks)}: expected a list of objects of classes derived from Callback"
        return
    for place, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            yield f"callbacks[{place}] = {short(callback)}: expected an object of a class derived from Callback"


def _plateau_mode(scheduler: object) -> object:
    """Return the `mode` of a `ReduceLROnPlateau`; None of another scheduler."""
    if scheduler is ReduceLROnPlateau:
        return "min"
    if isinstance(scheduler, partial) and scheduler.func is ReduceLROnPlateau:
        return scheduler.keywords.get("mode", "min")
    return None
