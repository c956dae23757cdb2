"""(seed, step) -> batch -> microbatches, the same on every machine.

    step 7, 3 steps an epoch          epoch 2, place 1:  rows 4..7 of the epoch's order
    batch_size 4, 10 rows             [ . . . . | 4 5 6 7 | . . ]    the last batch is smaller, never dropped
    2 microbatches                              [4 5][6 7]

Stage 0 asks for the inputs of a step and the last stage for its targets, each from its own source: what a batch holds
must follow from the seed and the step alone. After the training batches a run's held-out rows follow, as evaluation
steps.
"""

from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from typing import Protocol, TypeAlias

import msgspec
import torch

from stageline.pipeline.errors import DataError, describe_error, raised_by_user_code
from stageline.pipeline.tree import Tree, leaves, map_tensors, tensors

Batch: TypeAlias = tuple[Tree, Tree]  # inputs, targets


class Source(Protocol):
    """A data source. Two sources with the same arguments return the same batches, bit for bit."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the data, including a smaller last one; at least 1."""

    def batch(self, step: int) -> Batch:
        """The inputs and targets of `step`, which counts from 0 over all epochs. Steps may be asked for in any order,
        and more than once.

        Dimension 0 of every tensor is rows; there may be none. Must neither read nor change global random state.
        """

    def held_out(self) -> Batch | None:
        """Rows that are in no batch, to evaluate the trained model on; None if there are none."""


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
        self._count = rows((inputs, targets))
        if self._count == 0:
            raise DataError("the data source holds 0 rows. Give it at least one.")
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}. Give each batch at least one row.")
        self._inputs, self._targets, self._held_out = inputs, targets, held_out
        self._batch_size, self._seed, self._shuffle = batch_size, seed, shuffle
        # Stages on one worker are a few steps apart, so between two epochs both orders are in use.
        self._order = lru_cache(maxsize=2)(self._draw_order)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._count // self._batch_size)

    def batch(self, step: int) -> Batch:
        epoch, place = divmod(step, self.steps_per_epoch)
        here = slice(place * self._batch_size, (place + 1) * self._batch_size)
        if not self._shuffle:
            return _slice(self._inputs, here), _slice(self._targets, here)
        picked = self._order(epoch)[here]
        return _pick(self._inputs, picked), _pick(self._targets, picked)

    def held_out(self) -> Batch | None:
        return self._held_out

    def _draw_order(self, epoch: int) -> torch.Tensor:
        key = sha256(f"{self._seed}/epoch {epoch}".encode()).digest()[:8]
        return torch.randperm(self._count, generator=torch.Generator().manual_seed(int.from_bytes(key, "little")))


class Microbatch(msgspec.Struct, frozen=True):
    """A slice of a batch.

    `share` is the weight of its mean loss in the batch's: its fraction of the batch's rows, so that the weighted losses
    add up to the batch's mean. It is 1 in an empty batch: gradients are zeros, and losses left out of every sum.
    """

    inputs: Tree
    targets: Tree
    rows: int
    share: float


class Feed:
    """The microbatches of a run: of training steps 0 to `steps` - 1, then of as many evaluation steps as needed.

    The batches of the last `keep` steps are cached: that many are in use at once on one worker.
    """

    def __init__(self, source: Source, microbatches: int, steps: int, batch_size: int, *, keep: int = 4) -> None:
        self._source = source
        self._microbatches = microbatches
        self._steps = steps
        self._batch_size = batch_size
        self.held_out = source.held_out()
        self.of_step = lru_cache(maxsize=keep)(self._cut)

    @property
    def evaluation(self) -> range:
        """The evaluation steps: they follow the training steps; none if the source holds nothing back."""
        count = 0 if self.held_out is None else -(-rows(self.held_out) // self._batch_size)
        return range(self._steps, self._steps + count)

    def microbatch(self, step: int, microbatch: int) -> Microbatch:
        """Raises `DataError` if the source gives something that cannot be cut into microbatches."""
        return self.of_step(step)[microbatch]

    def batch(self, step: int) -> Batch:
        """The batch of a training step, asked of the source again. Raises `DataError` if it has none to give."""
        called = f"the data source's batch({step})"
        try:
            batch = self._source.batch(step)
        except BaseException as error:  # user code may raise anything; the cause is chained
            if not raised_by_user_code(error):
                raise
            raise DataError(f"{called} failed: {describe_error(error)}") from error
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise DataError(f"{called} returned a {type(batch).__name__}; wanted are two: (inputs, targets)")
        inputs, targets = batch
        return inputs, targets

    def _cut(self, step: int) -> list[Microbatch]:
        if step < self._steps:
            return self._cut_batch(step)
        if self.held_out is None:
            raise DataError(f"step {step} is beyond the run's {self._steps} steps, and no rows are held out")
        start = (step - self._steps) * self._batch_size
        here = slice(start, start + self._batch_size)
        inputs, targets = (_slice(each, here) for each in self.held_out)
        return cut(inputs, targets, self._microbatches)

    def _cut_batch(self, step: int) -> list[Microbatch]:
        batch = self.batch(step)
        try:
            return cut(*batch, self._microbatches)
        except DataError as error:
            raise DataError(f"the data source's batch({step}): {error}") from error


def cut(inputs: Tree, targets: Tree, microbatches: int) -> list[Microbatch]:
    """One batch as microbatches, rows split as `torch.tensor_split` does. Raises `DataError` if they disagree."""
    total = rows((inputs, targets))
    each, more = divmod(total, microbatches)
    counts = [each + (number < more) for number in range(microbatches)]
    return [
        Microbatch(x, y, count, count / total if total else 1.0)
        for x, y, count in zip(
            split_batch(inputs, microbatches), split_batch(targets, microbatches), counts, strict=True
        )
    ]


def rows(tree: Tree) -> int:
    """The number of rows (dimension 0) of all tensors of `tree`.

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
    """Cuts every tensor of `tree` along dimension 0 as `torch.tensor_split` does; the slices are views.

    The first `rows % microbatches` slices have one row more than the others; with fewer rows than microbatches the
    last ones are empty. Plain values are the same in every microbatch. Raises `DataError` as `rows` does.
    """
    rows(tree)
    if isinstance(tree, torch.Tensor):
        return list(tree.tensor_split(microbatches))
    slices = [leaf.tensor_split(microbatches) for leaf in tensors(tree)]
    return [_refill(tree, iter(microbatch)) for microbatch in zip(*slices, strict=True)]


def _slice(tree: Tree, here: slice) -> Tree:
    return map_tensors(lambda leaf: leaf[here], tree)


def _pick(tree: Tree, picked: torch.Tensor) -> Tree:
    return map_tensors(lambda leaf: leaf.index_select(0, picked.to(leaf.device)), tree)


def _refill(tree: Tree, leaves: Iterator[torch.Tensor]) -> Tree:
    return map_tensors(lambda _: next(leaves), tree)
