"""The batches that a fit trains on, from the line's position on.

a Loader or StreamLoader    begins there: batches(start, epochs=epochs)
another iterable            a list, a torch DataLoader: walked once for each epoch; those before the position are drawn
                            and passed over
an iterator                 goes on from where it stands
"""

from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from itertools import count, islice
from typing import Any

from stageline.pipeline.data import Batch
from stageline.pipeline.data.datasets.loader import Loader
from stageline.pipeline.data.datasets.stream import StreamLoader
from stageline.pipeline.errors import DataError
from stageline.workers.script.arguments.batch_shape import batches_of

FitBatches = Iterable[Batch] | Loader | StreamLoader


def steps_from(
    batches: FitBatches, position: int, epochs: int | None, steps: int | None, accumulate: int
) -> Iterator[Batch]:
    """What each step from `position` on is trained on, up to `steps` in all, and to the end of epoch number `epochs`:
    one pass if neither is given. With `accumulate` above 1, tuples of so many inputs and targets.

    Raises `DataError` for what is no iterable of (x, y), an epoch without batches, and batches that make no whole step
    at the end; `ValueError` for epochs of an iterator.
    """
    given: Any = batches
    if epochs is not None and isinstance(given, Iterator):
        raise ValueError(f"epochs = {epochs}: the batches are {type(given).__name__}, which can be walked once")
    every = _from(given, position * accumulate, 1 if epochs is None and steps is None else epochs)
    made = batches_of(every, "fit") if accumulate == 1 else _grouped(batches_of(every, "fit"), accumulate)
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


def _from(batches: Any, start: int, epochs: int | None) -> Any:
    if isinstance(batches, Loader | StreamLoader):
        return batches.batches(start, epochs=epochs)
    if isinstance(batches, Iterator) or not isinstance(batches, Iterable):
        return batches
    return islice(_walked(batches, epochs), start, None)


def _walked(batches: Iterable[Any], epochs: int | None) -> Iterator[Any]:
    for epoch in count() if epochs is None else range(epochs):
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise DataError(f"the batches, {type(batches).__name__}, have none in epoch {epoch}")


def _grouped(batches: Iterator[Batch], accumulate: int) -> Iterator[Batch]:
    while group := tuple(islice(batches, accumulate)):
        if len(group) < accumulate:
            raise DataError(
                f"a step has accumulate = {accumulate} batches, and the last {len(group)} make none. Pass steps=, or "
                "epochs whose batches make whole steps"
            )
        yield tuple(x for x, _ in group), tuple(y for _, y in group)
