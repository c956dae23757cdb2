"""The microbatches of a run: stage 0 asks for the inputs of a step and the last stage for its targets.

    batch of the source    0  1  2     3  4  5     6  7  8
    step                   0           1           2              accumulate = 3

Each asks a source of its own: what a batch holds must follow from the seed and the step alone. After the training
batches a run's held-out rows follow, as evaluation steps.
"""

from functools import lru_cache
from typing import cast

from stageline.pipeline.errors import DataError, describe_error, raised_by_user_code

from .batch import Batch, Microbatch, cut, cut_step, rows, slice_rows
from .source import NumberedSource, Source


class Feed:
    """The microbatches of a run: of training steps 0 to `steps` - 1, then of as many evaluation steps as needed.

    A training step has `accumulate` batches, each cut into `microbatches`; the one batch of an evaluation step is cut
    into as many as a training step has. The batches of the last `keep` steps are cached: that many are in use at once
    on one worker.
    """

    def __init__(
        self, source: Source, microbatches: int, steps: int, batch_size: int, *, accumulate: int = 1, keep: int = 4
    ) -> None:
        self._source = source
        self._microbatches = microbatches
        self._accumulate = accumulate
        self._steps = steps
        self._batch_size = batch_size
        self.held_out = source.held_out()
        self.of_step = lru_cache(maxsize=keep)(self._cut)

    @property
    def evaluation(self) -> range:
        """The evaluation steps: they follow the training steps; none if the source holds nothing back."""
        match self.held_out:
            case None:
                count = 0
            case tuple() | list():
                count = -(-rows(self.held_out) // self._batch_size)
            case source:
                count = source.steps_per_epoch
        return range(self._steps, self._steps + count)

    @property
    def numbered(self) -> NumberedSource | None:
        """The source, if it knows which samples each batch has."""
        source = self._source
        return cast(NumberedSource, source) if callable(getattr(source, "samples", None)) else None

    @property
    def held_out_sample(self) -> Batch | None:
        """Rows held out to compare with another process's: all that are in memory, or a source's first batch."""
        return self.held_out if self.held_out is None or isinstance(self.held_out, tuple | list) else self._held_out(0)

    def microbatch(self, step: int, microbatch: int) -> Microbatch:
        """Raises `DataError` if the source gives something that cannot be cut into microbatches."""
        return self.of_step(step)[microbatch]

    @property
    def last_of_epoch(self) -> int:
        """The batch that is the last of an epoch, and may have fewer rows; in a run of less than an epoch, the last."""
        return min(self._steps * self._accumulate, self._source.steps_per_epoch) - 1

    def batch(self, number: int) -> Batch:
        """A batch to train on, asked of the source again. Raises `DataError` if it has none to give."""
        return _asked(self._source, number, "the data source")

    def held_out_batch(self, step: int) -> Batch:
        """The batch of an evaluation step, likewise."""
        return self._held_out(step - self._steps)

    def _cut(self, step: int) -> list[Microbatch]:
        if step < self._steps:
            return self._cut_batches(range(step * self._accumulate, (step + 1) * self._accumulate))
        return cut(*self.held_out_batch(step), self._microbatches * self._accumulate)

    def _held_out(self, number: int) -> Batch:
        """The batch of an evaluation step."""
        match self.held_out:
            case None:
                step = self._steps + number
                raise DataError(f"step {step} is beyond the run's {self._steps} steps, and no rows are held out")
            case (inputs, targets):
                here = slice(number * self._batch_size, (number + 1) * self._batch_size)
                return slice_rows(inputs, here), slice_rows(targets, here)
            case source:
                return _asked(source, number, "the held-out source")

    def _cut_batches(self, numbers: range) -> list[Microbatch]:
        batches = [self.batch(number) for number in numbers]
        for number, batch in zip(numbers, batches, strict=True):
            try:
                for tree in (batch, *batch):
                    rows(tree)
            except DataError as error:
                raise DataError(f"the data source's batch({number}): {error}") from error
        return cut_step(batches, self._microbatches)


def _asked(source: Source, step: int, name: str) -> Batch:
    called = f"{name}'s batch({step})"
    try:
        batch = source.batch(step)
    except DataError as error:
        raise DataError(f"{called}: {error}") from error
    except BaseException as error:  # user code may raise anything; the cause is chained
        if not raised_by_user_code(error):
            raise
        raise DataError(f"{called} failed: {describe_error(error)}") from error
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise DataError(f"{called} returned a {type(batch).__name__}; wanted are two: (inputs, targets)")
    inputs, targets = batch
    return inputs, targets
