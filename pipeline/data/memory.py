"""The built-in source for tensors in memory. The order of an epoch follows from the seed and the epoch alone.

step 7, 3 steps an epoch          epoch 2, place 1:  rows 4..7 of the epoch's order
batch_size 4, 10 rows             [ . . . . | 4 5 6 7 | . . ]    the last batch is smaller, never dropped
"""

from functools import lru_cache
from hashlib import sha256

import torch

from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import Tree, map_tensors

from .batch import Batch, rows, slice_rows


class Order:
    """The order of rows, by step and epoch."""

    def __init__(self, count: int, batch_size: int, seed: int, *, shuffle: bool) -> None:
        """Define the order.

        Args:
            count: Number of rows, at least 1.
            batch_size: Rows of a step.
            seed: Seed of the order.
            shuffle: True to shuffle the rows in every epoch.

        Raises:
            DataError: `batch_size` is below 1.
        """
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}. Give each batch at least one row.")
        self.count, self.batch_size, self.seed, self.shuffle = count, batch_size, seed, shuffle
        # Stages on one worker are a few steps apart, so between two epochs both orders are in use.
        self._of_epoch = lru_cache(maxsize=2)(self._draw)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch, including a smaller last one."""
        return -(-self.count // self.batch_size)

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
