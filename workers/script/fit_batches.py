"""Batches of `Line.fit`, which begin at the line's position.

a Loader or StreamLoader    begins there: batches(start, epochs=epochs)
another iterable            a list, a torch DataLoader: walked once for each epoch; batches before the position are
                            drawn and passed over
an iterator                 continues from where it stands

A fit that a resumed script continues in the middle of an epoch compares the batches that it passes over with those
that the earlier steps were trained on; of a `Loader` or `StreamLoader`, only the batch before the position.
"""

from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from itertools import count, islice
from typing import Any

from stageline.pipeline.data import Batch
from stageline.pipeline.data.loader import Loader, StreamLoader
from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import Tree
from stageline.workers.script.calls.batch_record import DiffersFrom

from .checks import TARGETS, batches_of

FitBatches = Iterable[Batch] | Iterable[Mapping[str, Tree]] | Loader | StreamLoader


def steps_from(
    batches: FitBatches,
    position: int,
    epochs: int | None,
    steps: int | None,
    accumulate: int,
    differs: DiffersFrom | None = None,
    targets: str = TARGETS,
) -> Iterator[Batch]:
    """Yield the batch of each step from `position` on.

    Args:
        batches: Loader, iterable or iterator of (x, y).
        position: Number of steps already called.
        epochs: Number of epochs at whose end the batches stop. Without `epochs` and `steps`, it is one pass.
        steps: Total number of steps, counted from the beginning of the run.
        accumulate: Batches of a step; above 1, x and y are tuples of that length.
        differs: Compares a passed-over batch with the one that its step was trained on.
        targets: Key of the targets in a batch that is a dict.

    Raises:
        DataError: `batches` is no iterable of (x, y), an epoch has no batch, the last batches make no whole step, or
            the batches differ from those that the earlier steps were trained on.
        ValueError: `epochs` with an iterator.
    """
    given: Any = batches
    if epochs is not None and isinstance(given, Iterator):
        raise ValueError(
            f"epochs = {epochs}: the batches are an iterator of type {type(given).__name__}, which can be walked once. "
            f"Pass a list or a loader, or leave epochs out"
        )
    passes = 1 if epochs is None and steps is None else epochs
    if isinstance(given, Loader | StreamLoader):
        made = _from_loader(given, position, passes, accumulate, differs)
    elif isinstance(given, Iterator) or not isinstance(given, Iterable):
        made = _steps(given, accumulate, targets)
    else:
        made = _walked_to(given, position, passes, accumulate, differs, targets)
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


def known_epoch(batches: FitBatches, accumulate: int) -> int | None:
    """Return the number of steps in an epoch; None if it is not known, or no whole number."""
    each = _length(batches)
    return each // accumulate if each and each % accumulate == 0 else None


def steps_of_epoch(batches: FitBatches, accumulate: int, argument: str) -> int:
    """Return the number of steps in an epoch, for an argument of the value "epoch".

    Args:
        batches: Loader, iterable or iterator of (x, y).
        accumulate: Batches of a step.
        argument: Name of the argument, for errors.

    Raises:
        ValueError: The batches have no length, or an epoch is no whole number of steps.
    """
    each = _length(batches)
    if each is None:
        raise ValueError(
            f'{argument} = "epoch": the batches, of type {type(batches).__name__}, have no len(), so that the end of '
            f"an epoch is not known before it is reached; pass {argument} as a number of steps"
        )
    if not each or each % accumulate:
        raise ValueError(
            f'{argument} = "epoch": an epoch has {each} batches, which are no whole steps of accumulate = {accumulate} '
            f"batches; pass {argument} as a number of steps, or batches whose number is a multiple of {accumulate}"
        )
    return each // accumulate


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


def one_pass(batches: FitBatches) -> Iterable[Batch] | Iterable[Mapping[str, Tree]]:
    """Return batches that are equal each time they are walked; of a loader, those of epoch 0."""
    return batches.batches(epochs=1) if isinstance(batches, Loader | StreamLoader) else batches


def _steps(batches: Any, accumulate: int, targets: str = TARGETS) -> Iterator[Batch]:
    checked = batches_of(batches, "fit", targets)
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
    batches: Iterable[Any],
    position: int,
    epochs: int | None,
    accumulate: int,
    differs: DiffersFrom | None,
    targets: str,
) -> Iterator[Batch]:
    """Yield the batches of the steps from `position` on.

    Only steps of the epoch that `position` lies in are compared: between two epochs, a loader may shuffle freely.
    """
    drawn = WalkedBatches(batches, epochs)
    what, differing, epoch = "", 0, 0
    for step, batch in enumerate(_steps(drawn, accumulate, targets)):
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
        f"the batches, of type {type(batches).__name__}, are not those that this run was trained on: {what} in the "
        f"batch of step {step}, before line.position, which is {position}. To go on in the middle of an epoch would "
        "train some rows twice and others never. A torch DataLoader with shuffle=True needs "
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
                kind = type(self._batches).__name__
                raise DataError(f"the batches, of type {kind}, have none in epoch {epoch}: bring one or more")


def _grouped(batches: Iterator[Batch], accumulate: int) -> Iterator[Batch]:
    while step := tuple(islice(batches, accumulate)):
        if len(step) < accumulate:
            raise DataError(
                f"a step has accumulate = {accumulate} batches, and the last {len(step)} make none. Pass steps=, or "
                "epochs whose batches make whole steps"
            )
        yield tuple(x for x, _ in step), tuple(y for _, y in step)
