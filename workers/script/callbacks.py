"""`Line.fit`'s options, its callbacks, and its batches, which begin at the line's position.

a Loader or StreamLoader    begins there: batches(start, epochs=epochs)
another iterable            a list, a torch DataLoader: walked once for each epoch; batches before the position are
                            drawn and passed over
an iterator                 continues from where it stands

A fit that a resumed script continues in the middle of an epoch compares the batches that it passes over with those
that the earlier steps were trained on; of a `Loader` or `StreamLoader`, only the batch before the position.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

from stageline.pipeline.data import Batch
from stageline.pipeline.data.loader import Loader, StreamLoader
from stageline.pipeline.errors import DataError
from stageline.pipeline.evaluation import Better, Criterion, Score
from stageline.workers.runs.tensorboard import EventFile, writer_class
from stageline.workers.script.calls.batch_record import DiffersFrom
from stageline.workers.script.calls.calls import StepLoss

from .checks import batches_of, short

FitBatches = Iterable[Batch] | Loader | StreamLoader
BetterName = Literal["lower", "higher"]


def steps_from(
    batches: FitBatches,
    position: int,
    epochs: int | None,
    steps: int | None,
    accumulate: int,
    differs: DiffersFrom | None = None,
) -> Iterator[Batch]:
    """Yield the batch of each step from `position` on.

    Args:
        batches: Loader, iterable or iterator of (x, y).
        position: Number of steps already called.
        epochs: Number of epochs at whose end the batches stop. Without `epochs` and `steps`, it is one pass.
        steps: Total number of steps, counted from the beginning of the run.
        accumulate: Batches of a step; above 1, x and y are tuples of that length.
        differs: Compares a passed-over batch with the one that its step was trained on.

    Raises:
        DataError: `batches` is no iterable of (x, y), an epoch has no batch, the last batches make no whole step, or
            the batches differ from those that the earlier steps were trained on.
        ValueError: `epochs` with an iterator.
    """
    given: Any = batches
    if epochs is not None and isinstance(given, Iterator):
        raise ValueError(f"epochs = {epochs}: the batches are {type(given).__name__}, which can be walked once")
    passes = 1 if epochs is None and steps is None else epochs
    if isinstance(given, Loader | StreamLoader):
        made = _from_loader(given, position, passes, accumulate, differs)
    elif isinstance(given, Iterator) or not isinstance(given, Iterable):
        made = _steps(given, accumulate)
    else:
        made = _walked_to(given, position, passes, accumulate, differs)
    return made if steps is None else islice(made, max(0, steps - position))


def end_of(batches: FitBatches, epochs: int | None, steps: int | None, accumulate: int) -> int | None:
    """Return the step before which `steps_from` ends at the latest; None if only the batches know.

    Args:
        batches: Loader, iterable or iterator of (x, y).
        epochs: Number of epochs, or None.
        steps: Total number of steps, or None.
        accumulate: Batches of a step.
    """
    passes = 1 if epochs is None and steps is None else epochs
    each = None if passes is None else _length(batches)
    counted = None if passes is None or each is None else passes * each // accumulate
    return min((end for end in (counted, steps) if end is not None), default=None)


def _length(batches: object) -> int | None:
    """Return the number of batches in an epoch; None if unknown. A torch DataLoader of a stream raises on `len`."""
    if isinstance(batches, Iterator) or not isinstance(batches, Sized):
        return None
    with suppress(TypeError, NotImplementedError):
        return len(batches)
    return None


def held_out_of(batches: FitBatches) -> FitBatches | None:
    """Return the batches that a `Loader` holds out; None for other batches."""
    return batches.held_out() if isinstance(batches, Loader) else None


def one_pass(batches: FitBatches) -> Iterable[Batch]:
    """Return batches that are equal each time they are walked; of a loader, those of epoch 0."""
    return batches.batches(epochs=1) if isinstance(batches, Loader | StreamLoader) else batches


def _steps(batches: Any, accumulate: int) -> Iterator[Batch]:
    checked = batches_of(batches, "fit")
    return checked if accumulate == 1 else _grouped(checked, accumulate)


def _from_loader(
    loader: Loader | StreamLoader, position: int, epochs: int | None, accumulate: int, differs: DiffersFrom | None
) -> Iterator[Batch]:
    start = position * accumulate
    at_epoch = isinstance(loader, Loader) and start % loader.steps_per_epoch == 0
    if differs is None or at_epoch:
        yield from _steps(loader.batches(start, epochs=epochs), accumulate)
        return
    made = _steps(loader.batches(start - accumulate, epochs=epochs), accumulate)
    if (before := next(made, None)) is not None and (what := differs(position - 1, *before)):
        raise _other_batches(loader, position, position - 1, what)
    yield from made


def _walked_to(
    batches: Iterable[Any], position: int, epochs: int | None, accumulate: int, differs: DiffersFrom | None
) -> Iterator[Batch]:
    """Yield the batches of the steps from `position` on.

    Only steps of the epoch that `position` lies in are compared: between two epochs, a loader may shuffle freely.
    """
    drawn = WalkedBatches(batches, epochs)
    what, differing, epoch = "", 0, 0
    for step, batch in enumerate(_steps(drawn, accumulate)):
        if drawn.epoch != epoch:
            what, epoch = "", drawn.epoch
        if step < position and differs is not None and not what:
            what, differing = differs(step, *batch), step
        if step == position and what:
            raise _other_batches(batches, position, differing, what)
        if step >= position:
            yield batch


def _other_batches(batches: object, position: int, step: int, what: str) -> DataError:
    return DataError(
        f"the batches, {type(batches).__name__}, are not those that this run was trained on: {what} in the batch of "
        f"step {step}, before line.position, which is {position}. To go on in the middle of an epoch would train some "
        "rows twice and others never. A torch DataLoader with shuffle=True needs "
        "generator=torch.Generator().manual_seed(SEED), the same seed each time and a loader of its own for each fit; "
        "a stageline.Loader, the seed and the dataset of before; random augmentation, a seed. To train on other data, "
        'pass iter(batches), which begins with the first. settings={"data.check": False} goes on all the same'
    )


class WalkedBatches:
    """Batches of all epochs in a row; `epoch` is the number of the newest batch's epoch."""

    def __init__(self, batches: Iterable[Any], epochs: int | None) -> None:
        """Prepare to walk `batches` `epochs` times; None walks them without end."""
        self.epoch = 0
        self._batches = batches
        self._epochs = epochs

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches; raise `DataError` for an epoch that has none."""
        for epoch in count() if self._epochs is None else range(self._epochs):
            self.epoch, empty = epoch, True
            for batch in self._batches:
                empty = False
                yield batch
            if empty:
                raise DataError(f"the batches, {type(self._batches).__name__}, have none in epoch {epoch}")


def _grouped(batches: Iterator[Batch], accumulate: int) -> Iterator[Batch]:
    while step := tuple(islice(batches, accumulate)):
        if len(step) < accumulate:
            raise DataError(
                f"a step has accumulate = {accumulate} batches, and the last {len(step)} make none. Pass steps=, or "
                "epochs whose batches make whole steps"
            )
        yield tuple(x for x, _ in step), tuple(y for _, y in step)


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


class Callback:
    """Base class for objects that follow `Line.fit`: derive from it and override the methods needed.

    An exception from a method ends the fit, as it does in the body of a loop.

    Example:
        class Print(Callback):
            def on_step(self, step, loss):
                print(step, loss.item())

        line.fit(loader, epochs=2, callbacks=[Print()])
    """

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


class TensorBoard(Callback):
    """Callback that writes losses, gradient norms and evaluations to TensorBoard event files in `folder`.

    On a resumed line, entries of an earlier process from the first step of this one on are replaced. Raises
    `TensorBoardMissing`.

    Example:
        line.fit(loader, epochs=2, callbacks=[TensorBoard("events")])
    """

    def __init__(self, folder: str | Path) -> None:
        """Name the folder; raise `TensorBoardMissing` at once if the package is not installed."""
        self._folder = Path(folder)
        self._file: EventFile | None = None
        writer_class()  # it is missed at once

    def on_step(self, step: int, loss: StepLoss) -> None:
        """Write the loss and the gradient norm."""
        self._opened(step).add_step(step, loss.item(), loss.gradient_norm)

    def on_evaluation(self, step: int, found: Mapping[str, float | None]) -> None:
        """Write the evaluation and flush the file."""
        file = self._opened(step)
        file.add_evaluation(step, found)
        file.flush()

    def on_end(self, fitted: Fitted | None) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.__exit__()
            self._file = None

    def _opened(self, start: int) -> EventFile:
        if self._file is None:
            self._file = EventFile(self._folder, start)
        return self._file


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


def demand_fit(options: FitOptions, metrics: Iterable[str], cannot_save: str) -> None:
    """Raise `ValueError` if an option is unusable; the error names the argument, its value and the expected values.

    Args:
        options: Options of the fit.
        metrics: Names of the line's metrics.
        cannot_save: Why the line saves no checkpoint; "" if it does.
    """
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
