"""The built-in source for tensors in memory."""

import torch

from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import Tree, map_tensors

from .batch import Batch, rows, slice_rows
from .order import Order


class Rows:
    """The built-in source: rows of tensors in memory, shuffled in every epoch.

    `inputs` and `targets` are trees of tensors of any dtype, all with the same number of rows (dimension 0). With
    `shuffle` a batch is a copy of its rows; without, a view of them. Raises `DataError` if the tensors have different
    numbers of rows or none at all, or if `batch_size` is below 1.
    """

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
        count = rows((inputs, targets))
        if count == 0:
            raise DataError("the data source holds 0 rows. Give it at least one.")
        self._order = Order(count, batch_size, seed, shuffle=shuffle)
        self._inputs, self._targets, self._held_out = inputs, targets, held_out

    @property
    def order(self) -> Order:
        """Which rows each step has."""
        return self._order

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    def batch(self, step: int) -> Batch:
        if not self._order.shuffle:
            _, here = self._order.place(step)
            return slice_rows(self._inputs, here), slice_rows(self._targets, here)
        picked = self._order.rows(step)
        return _pick(self._inputs, picked), _pick(self._targets, picked)

    def samples(self, step: int) -> torch.Tensor:
        """The numbers of the rows of `step`: int64 [rows]."""
        return self._order.rows(step)

    def held_out(self) -> Batch | None:
        return self._held_out


def _pick(tree: Tree, picked: torch.Tensor) -> Tree:
    return map_tensors(lambda leaf: leaf.index_select(0, picked.to(leaf.device)), tree)
