"""The callbacks and options of `Line.fit`, and the callback that shows a fit in TensorBoard."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stageline.pipeline.evaluation import Better, Criterion, Score
from stageline.workers.runs.metrics import EventFile, writer_class
from stageline.workers.script.calls.calls import StepLoss

from .arguments.checks import short
from .fit_batches import FitBatches

BetterName = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Fitted:
    """How a fit ended: after so many `steps` of the line, and why (`reason`). `loss` is the last step's, None if it had
    no rows, or if this fit had nothing left to train. `evaluations` by step; `best` is None without one that found a
    finite number."""

    steps: int
    loss: float | None
    reason: str
    stopped_early: bool = False
    evaluations: Mapping[int, Mapping[str, float | None]] = field(default_factory=dict)
    best: Score | None = None


class Callback:
    """Derive from it, and define what is wanted. What a method raises ends the fit, as in the body of a loop."""

    def on_step(self, step: int, loss: StepLoss) -> None:
        """Step `step`, counted from 0, has this loss, which is there. In order; two later steps are under way by then,
        unless it is followed by an evaluation or the end."""

    def on_evaluation(self, step: int, found: Mapping[str, float | None]) -> None:
        """`found`, "loss" and the metrics, after `step` steps. The steps before it were told."""

    def on_best(self, step: int, value: float) -> None:
        """That was the best so far. If the fit keeps it, it is on the disk."""

    def on_end(self, fitted: Fitted | None) -> None:
        """The fit is over; with None, an error has ended it."""


@contextmanager
def named(callback: Callback, method: str, step: int | None = None) -> Iterator[None]:
    """What is raised within says of which callback it is."""
    try:
        yield
    except BaseException as error:
        of = "" if step is None else f" of step {step}"
        error.add_note(f"raised by {type(callback).__name__}.{method}{of}, a callback of Line.fit")
        raise


class TensorBoard(Callback):
    """Writes losses, norms of gradients and evaluations to event files in `folder`.

    Of a line that goes on, what an earlier process has written of the first step that this one is told of, and of
    later ones, is replaced. Raises `TensorBoardMissing`.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._file: EventFile | None = None
        writer_class()  # it is missed at once

    def on_step(self, step: int, loss: StepLoss) -> None:
        self._opened(step).add_step(step, loss.item(), loss.gradient_norm)

    def on_evaluation(self, step: int, found: Mapping[str, float | None]) -> None:
        file = self._opened(step)
        file.add_evaluation(step, found)
        file.flush()

    def on_end(self, fitted: Fitted | None) -> None:
        if self._file is not None:
            self._file.__exit__()
            self._file = None

    def _opened(self, start: int) -> EventFile:
        if self._file is None:
            self._file = EventFile(self._folder, start)
        return self._file


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The arguments of `Line.fit`, where they are described."""

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
        """What evaluations are compared by."""
        return Criterion(self.metric, Better(self.better or Better.LOWER), self.patience)


def demand_fit(options: FitOptions, metrics: Iterable[str], cannot_save: str) -> None:
    """Raises `ValueError`, which names the argument, its value and what is expected. `metrics` are the line's;
    `cannot_save`: why it saves no checkpoint, "" if it does."""
    if wrong := next(_complaints(options, ["loss", *metrics], cannot_save), None):
        raise ValueError(wrong)


def _complaints(options: FitOptions, metrics: Sequence[str], cannot_save: str) -> Iterator[str]:
    for name in ("epochs", "steps", "evaluate_every", "patience"):
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            yield f"{name} = {value!r}: expected a whole number of at least 1, or None"
    if options.metric not in metrics:
        yield f"metric = {options.metric!r}: this line measures {', '.join(metrics)}; see metrics= of Line"
    if options.better not in (None, *Better):
        yield f'better = {options.better!r}: expected "lower" or "higher"'
    if options.better is None and options.metric != "loss":
        yield f'metric = {options.metric!r}: pass better="higher" or better="lower", whichever is the better one'
    if options.evaluate_every is None:
        for name in ("held_out", "patience", "best"):
            if getattr(options, name) is not None:
                given = short(getattr(options, name))
                yield f"{name} = {given}: say after how many steps to evaluate, with evaluate_every="
    elif options.held_out is None:
        yield f"evaluate_every = {options.evaluate_every}: there is nothing to evaluate; pass held_out="
    elif isinstance(options.held_out, Iterator):
        yield (
            f"held_out = {short(options.held_out)} can be walked once, and is evaluated again and again: pass a list "
            "or a loader"
        )
    if options.best is not None and cannot_save:
        yield f'best = "{options.best}": {cannot_save}'
    callbacks: object = options.callbacks
    if not isinstance(callbacks, Sequence):
        yield f"callbacks = {short(callbacks)}: expected a list of objects of classes derived from Callback"
        return
    for place, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            yield f"callbacks[{place}] = {short(callback)}: expected an object of a class derived from Callback"
