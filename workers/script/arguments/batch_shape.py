"""What a script gives as batches is looked at before anything is sent: a worker that fails for it ends the run."""

from collections.abc import Iterable, Iterator
from typing import Any

from stageline.pipeline.data import Batch, rows
from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import Tree, tensors

from .kinds import a_kind


def demand_batch(x: Tree, y: Tree) -> None:
    """Raises `DataError` if `x` or `y` has no tensor, or they have no common number of rows."""
    for tree, name, what in ((x, "x", "input"), (y, "y", "target")):
        if not tensors(tree):
            raise DataError(
                f"there is no {what}: {name} is {_kind(tree)}; expected a tensor whose dimension 0 counts the rows, "
                "or a tree of such"
            )
    rows((x, y))


def batches_of(batches: Iterable[Batch], taker: str = "evaluate") -> Iterator[Batch]:
    """The batches that the method `taker` was given, each looked at when it is asked for. Raises `DataError`."""
    given: Any = batches
    if not isinstance(given, Iterable):
        raise _no_batches(taker, f"it got {_kind(given)}")
    for number, batch in enumerate(given):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise _no_batches(taker, f"it got {_kind(given)}, whose element {number} is {_kind(batch)}")
        yield batch[0], batch[1]


def _no_batches(taker: str, got: str) -> DataError:
    return DataError(f"{taker} takes an iterable of (x, y) batches, and {got}. For one batch write [(x, y)]")


def _kind(value: object) -> str:
    if value is None:
        return "None"
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{a_kind(value)}{size}"
