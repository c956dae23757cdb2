"""What `Line.fit` is given: its options, its callbacks, and batches, which it takes from the line's position on.

a Loader or StreamLoader    begins there: batches(start, epochs=epochs)
another iterable            a list, a torch DataLoader: walked once for each epoch; batches before the position are
                            drawn and passed over
an iterator                 goes on from where it stands

A fit that a resumed script goes on with, in the middle of an epoch, compares what it passes over with what the steps
before were trained on; of a `Loader` or `StreamLoader`, the batch before the position.
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
from stageline.workers.runs.metrics import EventFile, writer_class
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
    """What each step from `position` on is trained on, up to `steps` in all, and to the end of epoch number `epochs`:
    one pass if neither is given. With `accumulate` above 1, tuples of so many inputs and targets. `differs` compares
    a batch that is passed over with the one that its step was trained on.

    Raises `DataError` for what is no iterable of (x, y), an epoch without batches, batches that make no whole step
    at the end, and other batches than those that the steps before were trained on; `ValueError` for epochs of an
    iterator.
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
    """The step that `steps_from` ends before at the latest; None if only the batches know."""
    passes = 1 if epochs is None and steps is None else epochs
    each = None if passes is None else _length(batches)
    counted = None if passes is None or each is None else passes * each // accumulate
    return min((end for end in (counted, steps) if end is not None), default=None)


def _length(batches: object) -> int | None:
    """How many batches an epoch has; None if it does not tell. A torch DataLoader of a stream raises."""
    if isinstance(batches, Iterator) or not isinstance(batches, Sized):
        return None
    with suppress(TypeError, NotImplementedError):
        return len(batches)
    return None


def held_out_of(batches: FitBatches) -> FitBatches | None:
    """What a loader holds out of its batches; None for others."""
    return batches.held_out() if isinstance(batches, Loader) else None


def one_pass(batches: FitBatches) -> Iterable[Batch]:
    """The same batches each time: a loader's are those of epoch 0."""
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
    """The steps from `position` on. Steps before the epoch in which that lies are not compared: between two epochs, a
    loader may shuffle as it likes."""
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
    """The batches of all epochs, one after the other, and the number of the epoch that the newest one is of."""

    def __init__(self, batches: Iterable[Any], epochs: int | None) -> None:
        self.epoch = 0
        self._batches = batches
        self._epochs = epochs

    def __iter__(self) -> Iterator[Any]:
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
