"""The microbatches of a run: stage 0 asks for the inputs of a step and the last stage for its targets.

    batch of the source    0  1  2     3  4  5     6  7  8
    step                   0           1           2              accumulate = 3

Each stage asks a source of its own: what a batch holds must follow from the seed and the step alone. Each round of
evaluation has the same batches, of the rows held out.
"""

from functools import cached_property, lru_cache, partial
from typing import cast

import torch

from stageline.pipeline.errors import DataError

from .batch import Batch, Microbatch, Rows, cut_step, rows
from .source import NumberedSource, Numbering, Source, called, samples_of


class Feed:
    """The microbatches of a run: of its training steps, and of the batches of the rows held out."""

    def __init__(
        self, source: Source, microbatches: int, steps: int, batch_size: int, *, accumulate: int = 1, keep: int = 4
    ) -> None:
        """Take the source of a run.

        Args:
            source: Data source.
            microbatches: Microbatches into which each batch of a training step is cut. A batch of rows held out is cut
                into as many as a whole training step has.
            steps: Training steps, numbered from 0.
            batch_size: Rows of a batch held out, where these rows are in memory.
            accumulate: Batches of a training step.
            keep: Steps, and batches held out, that are cached: that many are in use at once on one worker.
        """
        self._source = source
        self._microbatches = microbatches
        self._accumulate = accumulate
        self._steps = steps
        self._batch_size = batch_size
        self.held_out = source.held_out()
        self.of_step = lru_cache(maxsize=keep)(self._cut)
        self._of_held_out = lru_cache(maxsize=keep)(self._cut_held_out)

    @cached_property
    def _evaluated(self) -> "Source | _NoRows":
        """The rows held out as a source, in their own order."""
        kept = self.held_out
        if isinstance(kept, tuple | list):
            return Rows(*kept, self._batch_size, 0, shuffle=False) if rows(kept) else _NoRows()
        return _NoRows() if kept is None else kept

    @property
    def batches_held_out(self) -> int:
        """Number of batches that the rows held out make; 0 if the source holds nothing back."""
        return self._evaluated.steps_per_epoch

    @property
    def numbered(self) -> NumberedSource | None:
        """The source, if it knows which samples each batch has, else None."""
        return _numbered(self._source)

    @cached_property
    def numbering(self) -> Numbering | None:
        """The samples of each microbatch; None if the source does not know them."""
        source = self.numbered
        return None if source is None else Numbering(partial(samples_of, source), self._microbatches, self._accumulate)

    @property
    def held_out_sample(self) -> Batch | None:
        """Rows held out to compare with another process's: all that are in memory, or a source's first batch."""
        kept = self.held_out
        return kept if kept is None or isinstance(kept, tuple | list) else self.held_out_batch(0)

    def microbatch(self, step: int, microbatch: int) -> Microbatch:
        """Return a microbatch of a training step.

        Raises `DataError` if the source gives something that cannot be cut into microbatches.
        """
        return self.of_step(step)[microbatch]

    def held_out_microbatch(self, batch: int, microbatch: int) -> Microbatch:
        """Return a microbatch of an evaluated batch; each round of evaluation has the same ones, from the first on."""
        return self._of_held_out(self._held_out_number(batch))[microbatch]

    def samples(self, step: int, microbatch: int) -> torch.Tensor | None:
        """Return the numbers, in the data set, of the microbatch's rows: int64 [rows]; None if the source has none.

        Raises:
            DataError: The source fails, or gives another number of samples than rows.
        """
        if self.numbering is None:
            return None
        count, what = self.microbatch(step, microbatch).rows, f"microbatch {microbatch} of step {step}"
        return _as_many(self.numbering.microbatch(step, microbatch), count, what)

    def held_out_samples(self, batch: int, microbatch: int) -> torch.Tensor | None:
        """Return the numbers of an evaluated microbatch's rows: int64 [rows]; None if the rows have no numbers.

        Rows held out have numbers of their own. Raises `DataError` as `samples` does, or if no rows are held out.
        """
        number = self._held_out_number(batch)
        if (source := _numbered(self._evaluated)) is None:
            return None
        own = samples_of(source, number).tensor_split(self._microbatches * self._accumulate)[microbatch]
        count = self.held_out_microbatch(batch, microbatch).rows
        return _as_many(own, count, f"microbatch {microbatch} of evaluated batch {batch}")

    @property
    def last_of_epoch(self) -> int:
        """Number of the last batch of an epoch, which may have fewer rows; of the run's last batch in a shorter run."""
        return min(self._steps * self._accumulate, self._source.steps_per_epoch) - 1

    def batch(self, number: int) -> Batch:
        """Return a batch to train on, asked of the source again. Raises `DataError` if the source gives none."""
        return _asked(self._source, number, "the data source")

    def held_out_batch(self, number: int) -> Batch:
        """Return a batch of the rows held out, asked of their source again. Raises `DataError` if it gives none."""
        return _asked(self._evaluated, number, "the held-out source")

    def _held_out_number(self, batch: int) -> int:
        if not self.batches_held_out:
            raise DataError(f"batch {batch} cannot be evaluated: no rows are held out")
        return batch % self.batches_held_out

    def _cut_held_out(self, number: int) -> list[Microbatch]:
        return cut_step([self.held_out_batch(number)], self._microbatches * self._accumulate)

    def _cut(self, step: int) -> list[Microbatch]:
        numbers = range(step * self._accumulate, (step + 1) * self._accumulate)
        batches = [self.batch(number) for number in numbers]
        for number, batch in zip(numbers, batches, strict=True):
            try:
                for tree in (batch, *batch):
                    rows(tree)
            except DataError as error:
                raise DataError(f"the data source's batch({number}): {error}") from error
        return cut_step(batches, self._microbatches)


class _NoRows:
    """The source of a run that holds no rows out."""

    steps_per_epoch = 0

    def batch(self, step: int) -> Batch:
        """Raise `DataError`."""
        raise DataError(f"there is no batch {step} of rows held out: the source holds nothing back")


def _asked(source: "Source | _NoRows", step: int, name: str) -> Batch:
    what = f"{name}'s batch({step})"
    batch = called(partial(source.batch, step), what)
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise DataError(f"{what} returned an object of type {type(batch).__name__}; expected two: (inputs, targets)")
    inputs, targets = batch
    return inputs, targets


def _numbered(source: object) -> NumberedSource | None:
    return cast(NumberedSource, source) if callable(getattr(source, "samples", None)) else None


def _as_many(samples: torch.Tensor, count: int, what: str) -> torch.Tensor:
    """Return `samples`. Raises `DataError` unless there are `count`, the number of rows of `what`."""
    if len(samples) != count:
        raise DataError(f"samples gave {len(samples)} numbers for the {count} rows of {what}")
    return samples
