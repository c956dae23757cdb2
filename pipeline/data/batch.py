"""Batches and microbatches: each batch of a step is cut along its rows as `torch.tensor_split` does.

10 rows, 4 microbatches        [0 1 2][3 4 5][6 7][8 9]        their mean losses count 3/10, 3/10, 2/10, 2/10
10 and 6 rows, 2 of each       [0 1 2 3 4][5 6 7 8 9] [0 1 2][3 4 5]                5/16, 5/16, 3/16, 3/16
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec
import torch

from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import Tree, leaves, map_tensors, tensors

Batch: TypeAlias = tuple[Tree, Tree]  # inputs, targets


class Microbatch(msgspec.Struct, frozen=True):
    """A slice of a batch.

    Attributes:
        inputs: Inputs, a tree of tensors of shape (rows, ...).
        targets: Targets, a tree of tensors of shape (rows, ...).
        rows: Number of rows.
        share: Weight of the microbatch's mean loss in the step's loss: its fraction of the step's rows, so that the
            weighted losses add up to the mean. 1 in a step without rows: gradients are zeros, and losses are left out
            of every sum.
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
        raise DataError(f"tensors of shapes {shapes} have no common number of rows. Make dimension 0 count rows.")
    return counts.pop()


def split_batch(tree: Tree, microbatches: int) -> list[Tree]:
    """Cut every tensor of `tree` along dimension 0 as `torch.tensor_split` does; the slices are views.

    The first `rows % microbatches` slices have one row more than the others; with fewer rows than microbatches the
    last ones are empty. Plain values are the same in every microbatch. Raises `DataError` as `rows` does.
    """
    rows(tree)
    if isinstance(tree, torch.Tensor):
        return list(tree.tensor_split(microbatches))
    slices = [leaf.tensor_split(microbatches) for leaf in tensors(tree)]
    return [_refill(tree, iter(microbatch)) for microbatch in zip(*slices, strict=True)]


def slice_rows(tree: Tree, here: slice) -> Tree:
    """Return the rows `here` of every tensor in `tree`, as views."""
    return map_tensors(lambda leaf: leaf[here], tree)


def _refill(tree: Tree, leaves: Iterator[torch.Tensor]) -> Tree:
    return map_tensors(lambda _: next(leaves), tree)
