"""Batches and microbatches: each batch of a step is cut along its rows as `torch.tensor_split` does.

10 rows, 4 microbatches        [0 1 2][3 4 5][6 7][8 9]        their mean losses count 3/10, 3/10, 2/10, 2/10
10 and 6 rows, 2 of each       [0 1 2 3 4][5 6 7 8 9] [0 1 2][3 4 5]                5/16, 5/16, 3/16, 3/16

`Rows` is the built-in source for tensors in memory. The order of an epoch follows from the seed and the epoch alone:

step 7, 3 steps an epoch          epoch 2, place 1:  rows 4..7 of the epoch's order
batch_size 4, 10 rows             [ . . . . | 4 5 6 7 | . . ]    the last batch is smaller, never dropped
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import TypeAlias

import msgspec
import torch

from stageline.pipeline.errors import DataError
from stageline.pipeline.printable import bounded
from stageline.pipeline.tree import Tree, concatenate, describe, leaves, map_tensors, tensors

Batch: TypeAlias = tuple[Tree, Tree]  # inputs, targets


class Microbatch(msgspec.Struct, frozen=True):
    """A slice of a batch.

    Attributes:
        inputs: Inputs, a tree of tensors of shape (rows, ...).
        targets: Targets, a tree of tensors of shape (rows, ...).
        rows: Number of rows.
        share: Weight of the microbatch's mean loss in the step's loss: its fraction of the step's rows, so that the
            weighted losses add up to the mean. Of no use without rows: no stage computes such a microbatch.
    """

    inputs: Tree
    targets: Tree
    rows: int
    share: float


def cut(inputs: Tree, targets: Tree, microbatches: int) -> list[Microbatch]:
    """Cut one batch into microbatches, rows split as `torch.tensor_split` does.

    Args:
        inputs: Tree of tensors of shape (rows, ...).
        targets: Tree of tensors with the same number of rows.
        microbatches: Number of microbatches.

    Raises:
        DataError: Tensors have different numbers of rows.
    """
    return cut_step([(inputs, targets)], microbatches)


def cut_step(batches: Sequence[Batch], microbatches: int) -> list[Microbatch]:
    """Cut each batch of one step into `microbatches` microbatches, and return them one batch after the other.

    Raises:
        DataError: Tensors of a batch have different numbers of rows.
    """
    counts = [rows(batch) for batch in batches]
    total = sum(counts)
    return [
        Microbatch(x, y, count, count / total if total else 1.0)
        for batch, size in zip(batches, counts, strict=True)
        for (x, y), count in zip(_split_both(*batch, microbatches), _sizes(size, microbatches), strict=True)
    ]


def _split_both(inputs: Tree, targets: Tree, microbatches: int) -> Iterator[Batch]:
    slices = split_batch(inputs, microbatches)
    return zip(slices, slices if targets is inputs else split_batch(targets, microbatches), strict=True)


def _sizes(size: int, microbatches: int) -> list[int]:
    each, more = divmod(size, microbatches)
    return [each + (number < more) for number in range(microbatches)]


def rows(tree: Tree) -> int:
    """Return the number of rows (dimension 0) of all tensors of `tree`.

    Raises `DataError` if there is no tensor, one has no dimensions, or two differ.
    """
    shapes = [tuple(leaf.shape) for leaf in tensors(tree)]
    if not shapes:
        found = ", ".join(type(leaf).__name__ for _, leaf in leaves(tree))
        raise DataError(f"no tensor is there, only {found or 'nothing'}. Give tensors, whose dimension 0 counts rows.")
    counts = {shape[0] for shape in shapes if shape}
    if len(counts) != 1 or () in shapes:
        raise DataError(
            f"{bounded(describe(tree), 500)} have no common number of rows. Make dimension 0 count rows, and pad "
            "sequences of unlike lengths to one tensor."
        )
    return counts.pop()


def split_batch(tree: Tree, microbatches: int) -> list[Tree]:
    """Cut every tensor of `tree` along dimension 0 as `torch.tensor_split` does; the slices are views.

    Args:
        tree: Tree of tensors of any dtype whose dimension 0 counts rows. Plain values are the same in every microbatch.
        microbatches: Number of slices.

    Returns:
        Trees in the order of rows. The first `rows % microbatches` have one row more than the others; with fewer rows
        than microbatches the last ones are empty.

    Raises:
        DataError: `tree` has no tensor, or its tensors have different numbers of rows.
    """
    rows(tree)
    if isinstance(tree, torch.Tensor):
        return list(tree.tensor_split(microbatches))
    slices = [leaf.tensor_split(microbatches) for leaf in tensors(tree)]
    return [_refill(tree, iter(microbatch)) for microbatch in zip(*slices, strict=True)]


def joined_outputs(outputs: Sequence[Tree]) -> Tree:
    """Return a model's outputs for the microbatches of a batch as its output for the batch.

    Raises:
        DataError: A tensor of the outputs has no rows to join, or not the same shape for each row.
    """
    paths = [path for path, leaf in leaves(outputs[0]) if isinstance(leaf, torch.Tensor)]
    for path, *parts in zip(paths, *map(tensors, outputs), strict=True):
        if not all(part.dim() for part in parts) or len({part.shape[1:] for part in parts}) > 1:
            raise DataError(
                f"the model's output{path} is {', '.join(dict.fromkeys(map(describe, parts)))} for the microbatches of "
                f"a batch, which a prediction joins by rows (dimension 0). Let the forward return it in training mode "
                f"only, with `if self.training`, or with a dimension of rows first and all others of one size"
            )
    return concatenate(outputs)


def slice_rows(tree: Tree, here: slice) -> Tree:
    """Return the rows `here` of every tensor in `tree`, as views."""
    return map_tensors(lambda leaf: leaf[here], tree)


def _refill(tree: Tree, leaves: Iterator[torch.Tensor]) -> Tree:
    return map_tensors(lambda _: next(leaves), tree)


class Order:
    """The order of rows, by step and epoch."""

    def __init__(self, count: int, batch_size: int, seed: int, *, shuffle: bool, drop_last: bool = False) -> None:
        """Define the order.

        Args:
            count: Number of rows, at least 1.
            batch_size: Rows of a step.
            seed: Seed of the order.
            shuffle: True to shuffle the rows in every epoch.
            drop_last: True to leave out the last batch of an epoch if it is smaller.

        Raises:
            DataError: `batch_size` is below 1, or every batch would be left out.
        """
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}. Give each batch at least one row.")
        if drop_last and count < batch_size:
            raise DataError(
                f"drop_last leaves out every batch: there are {count} rows, and batch_size is {batch_size}. "
                f"Use batch_size = {count} or less, or leave drop_last out."
            )
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        # Stages on one worker are a few steps apart, so between two epochs both orders are in use.
        self._of_epoch = lru_cache(maxsize=2)(self._draw)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch, including a smaller last one unless `drop_last` leaves it out."""
        whole, rest = divmod(self.count, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def place(self, step: int) -> tuple[int, slice]:
        """Return the epoch of `step`, and its place in the order of that epoch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return epoch, slice(place * self.batch_size, (place + 1) * self.batch_size)

    def rows(self, step: int) -> torch.Tensor:
        """Return the numbers of the rows of `step`: int64 [rows]."""
        epoch, here = self.place(step)
        return self._of_epoch(epoch)[here]

    def _draw(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.count)
        key = sha256(f"{self.seed}/epoch {epoch}".encode()).digest()[:8]
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(int.from_bytes(key, "little")))


class Rows:
    """The built-in source: rows of tensors in memory, shuffled in every epoch."""

    def __init__(
        self,
        inputs: Tree,
        targets: Tree,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool = True,
        held_out: Batch | None = None,
    ) -> None:
        """Take the tensors. With `shuffle`, a batch is a copy of its rows; without, it is a view of them.

        Args:
            inputs: Tree of tensors of any dtype, shape (rows, ...).
            targets: Tree of tensors with the same number of rows.
            batch_size: Rows of a batch.
            seed: Seed of the order.
            shuffle: True to shuffle the rows in every epoch.
            held_out: Inputs and targets to evaluate on.

        Raises:
            DataError: The tensors have different numbers of rows or none at all, or `batch_size` is below 1.
        """
        count = rows((inputs, targets))
        if count == 0:
            raise DataError("the data source holds 0 rows. Give it at least one.")
        self._order = Order(count, batch_size, seed, shuffle=shuffle)
        self._inputs, self._targets, self._held_out = inputs, targets, held_out

    @property
    def order(self) -> Order:
        """The order of rows, by step."""
        return self._order

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in an epoch, including a smaller last one."""
        return self._order.steps_per_epoch

    def batch(self, step: int) -> Batch:
        """Return the inputs and targets of `step`."""
        if not self._order.shuffle:
            _, here = self._order.place(step)
            return slice_rows(self._inputs, here), slice_rows(self._targets, here)
        picked = self._order.rows(step)
        return _pick(self._inputs, picked), _pick(self._targets, picked)

    def samples(self, step: int) -> torch.Tensor:
        """Return the numbers of the rows of `step`: int64 [rows]."""
        return self._order.rows(step)

    def held_out(self) -> Batch | None:
        """Return the inputs and targets to evaluate on; None if there are none."""
        return self._held_out


def _pick(tree: Tree, picked: torch.Tensor) -> Tree:
    return map_tensors(lambda leaf: leaf.index_select(0, picked.to(leaf.device)), tree)
