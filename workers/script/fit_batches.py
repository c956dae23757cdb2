"""The batches that a fit trains on, from the line's position on.

a Loader or StreamLoader    begins there: batches(start, epochs=epochs)
another iterable            a list, a torch DataLoader: walked once for each epoch; those before the position are drawn
                            and passed over
an iterator                 goes on from where it stands

A fit that a resumed script goes on with, in the middle of an epoch, compares what it passes over with what the steps
before were trained on; of a `Loader` or `StreamLoader`, the batch before the position.
"""

from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from itertools import count, islice
from typing import Any

from stageline.pipeline.data import Batch
from stageline.pipeline.data.loader import Loader, StreamLoader
from stageline.pipeline.errors import DataError
from stageline.workers.script.calls.batch_record import DiffersFrom

from .arguments.checks import batches_of

FitBatches = Iterable[Batch] | Loader | StreamLoader


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
    while group := tuple(islice(batches, accumulate)):
        if len(group) < accumulate:
            raise DataError(
                f"a step has accumulate = {accumulate} batches, and the last {len(group)} make none. Pass steps=, or "
                "epochs whose batches make whole steps"
            )
        yield tuple(x for x, _ in group), tuple(y for _, y in group)
