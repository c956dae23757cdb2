"""Cuts each step's batch into its microbatches: training batches first, then the held-out rows as evaluation steps."""

from functools import lru_cache

import msgspec

from stageline.pipeline.errors import describe_error
from stageline.pipeline.tree import Tree, map_tensors

from .source import DataError, Source, rows, share, split_batch


class Microbatch(msgspec.Struct, frozen=True):
    """A slice of a batch. `share` is its fraction of the batch's rows, by which its loss is weighted in the step's."""

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
        self._held_out = source.held_out()
        self.of_step = lru_cache(maxsize=keep)(self._cut)

    @property
    def evaluation(self) -> range:
        """The evaluation steps: they follow the training steps; none if the source holds nothing back."""
        count = 0 if self._held_out is None else -(-rows(self._held_out) // self._batch_size)
        return range(self._steps, self._steps + count)

    def microbatch(self, step: int, microbatch: int) -> Microbatch:
        """Raises `DataError` if the source gives something that cannot be cut into microbatches."""
        return self.of_step(step)[microbatch]

    def _cut(self, step: int) -> list[Microbatch]:
        inputs, targets = self._batch(step)
        return cut(inputs, targets, self._microbatches)

    def _batch(self, step: int) -> tuple[Tree, Tree]:
        if step < self._steps:
            try:
                inputs, targets = self._source.batch(step)
            except Exception as error:  # user code may raise anything; the cause is chained
                raise DataError(f"the data source's batch({step}) failed: {describe_error(error)}") from error
            return inputs, targets
        if self._held_out is None:
            raise DataError(f"step {step} is beyond the run's {self._steps} steps, and no rows are held out")
        start = (step - self._steps) * self._batch_size
        here = slice(start, start + self._batch_size)
        inputs, targets = self._held_out
        return map_tensors(lambda t: t[here], inputs), map_tensors(lambda t: t[here], targets)


def cut(inputs: Tree, targets: Tree, microbatches: int) -> list[Microbatch]:
    """One batch as microbatches, rows split as `torch.tensor_split` does. Raises `DataError` if they disagree."""
    total = rows((inputs, targets))
    each, more = divmod(total, microbatches)
    counts = [each + (number < more) for number in range(microbatches)]
    return [
        Microbatch(x, y, count, share(count, total))
        for x, y, count in zip(
            split_batch(inputs, microbatches), split_batch(targets, microbatches), counts, strict=True
        )
    ]
