"""Data sources: (seed, step) gives a batch, the same on every machine; and the numbers of the samples in it.

samples of batches 0 and 1     [7 2 9 4] [0 5 1 8]      accumulate = 2, 2 microbatches of each
microbatches of step 0         [7 2] [9 4] [0 5] [1 8]
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, Protocol

import torch

from stageline.pipeline.errors import DataError, describe_error, raised_by_user_code

from .batch import Batch

Samples = Callable[[int], torch.Tensor]  # of a batch's number: int64 [rows]


class Source(Protocol):
    """A data source. Two sources with the same arguments return the same batches, bit for bit.

    A source that also tells which samples its batches have is a `NumberedSource`.
    """

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in one pass over the data, including a smaller last one; at least 1."""

    def batch(self, step: int) -> Batch:
        """Return the inputs and targets of `step`, which counts from 0 over all epochs.

        Steps may be asked for in any order, and more than once.

        Dimension 0 of every tensor is rows; there may be none. A source must neither read nor change global random
        state.
        """

    def held_out(self) -> "Batch | Source | None":
        """Return the rows that are in no batch, to evaluate the trained model on; None if there are none.

        If the result is a source, the batches of one epoch are evaluated, each drawn when its turn comes.
        """


class NumberedSource(Source, Protocol):
    """A source that knows which samples each batch has, as `Rows` and `Loader` do.

    `model.prefix_cache` needs these numbers, and taps store them.
    """

    def samples(self, step: int) -> torch.Tensor:
        """Return the numbers of the samples in `batch(step)`, in the order of its rows: int64 [rows], from 0 on.

        A number stands for the same inputs in all epochs.
        """


def called(function: Callable[[], Any], what: str, failed: str = "failed") -> Any:
    """Return the result of user code. Raises `DataError` with the user's line if it raises.

    Args:
        function: Calls the user's code.
        what: Name of the call, which begins the error.
        failed: Verb of the error, in a sentence with `what`.
    """
    try:
        return function()
    except DataError as error:
        raise DataError(f"{what}: {error}") from error
    except BaseException as error:  # user code may raise anything; the cause is chained
        if not raised_by_user_code(error):
            raise
        raise DataError(f"{what} {failed}: {describe_error(error)}") from error


def samples_of(source: NumberedSource, step: int) -> torch.Tensor:
    """Return `source.samples(step)`: int64 [rows]. Raises `DataError` if it fails, or returns something else."""
    found: object = called(partial(source.samples, step), f"the data source's samples({step})")
    if isinstance(found, torch.Tensor) and found.dtype is torch.int64 and found.dim() == 1 and not (found < 0).any():
        return found
    wrong = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
    raise DataError(f"the data source's samples({step}) is {wrong}; expected numbers from 0 on, int64 [rows]")


class Numbering:
    """The samples of each microbatch of a run."""

    def __init__(self, samples: Samples, microbatches: int, accumulate: int = 1) -> None:
        """Take the samples of batches.

        Args:
            samples: Returns the samples of a batch, given its number: int64 [rows].
            microbatches: Microbatches of a batch.
            accumulate: Batches of a step.
        """
        self._samples = samples
        self._microbatches = microbatches
        self._accumulate = accumulate
        self._of_batch = lru_cache(maxsize=4)(self._cut)

    def microbatch(self, step: int, microbatch: int) -> torch.Tensor:
        """Return the samples of a microbatch: int64 [rows]. Raises `DataError` as `samples` does."""
        batch, place = divmod(microbatch, self._microbatches)
        return self._of_batch(step * self._accumulate + batch)[place]

    def count(self, steps: int) -> int:
        """Return one more than the highest number among the samples of the first `steps` steps."""
        return 1 + max((int(found.max()) for found in self.batches(steps) if len(found)), default=-1)

    def batches(self, steps: int) -> Iterator[torch.Tensor]:
        """Return the samples of each batch of the first `steps` steps."""
        return map(self._samples, range(steps * self._accumulate))

    def _cut(self, batch: int) -> tuple[torch.Tensor, ...]:
        return self._samples(batch).tensor_split(self._microbatches)


class OwnTargets:
    """The batches of one source with the targets of another in place of their own."""

    def __init__(self, inputs: Source, targets: Source) -> None:
        """Join the two sources.

        Args:
            inputs: Source whose inputs, rows held out and sample numbers are used.
            targets: Source whose targets are used.

        Raises:
            DataError: The sources have different numbers of batches, or one holds rows back and the other does not.
        """
        if inputs.steps_per_epoch != targets.steps_per_epoch:
            raise DataError(
                f"there are {inputs.steps_per_epoch} batches in an epoch of inputs, and {targets.steps_per_epoch} in "
                "one of data.targets; both must draw the same rows"
            )
        self._inputs, self._targets = inputs, targets
        self.steps_per_epoch = inputs.steps_per_epoch
        self._held_out = _joined(inputs.held_out(), targets.held_out())
        samples: Samples | None = getattr(inputs, "samples", None)
        if samples is not None:
            self.samples = samples

    def batch(self, step: int) -> Batch:
        """Return the inputs of one source and the targets of the other for `step`."""
        return self._inputs.batch(step)[0], self._targets.batch(step)[1]

    def held_out(self) -> Batch | Source | None:
        """Return the rows held out, with the targets of the source of targets; None if there are none."""
        return self._held_out


def _joined(inputs: Batch | Source | None, targets: Batch | Source | None) -> Batch | Source | None:
    if inputs is None and targets is None:
        return None
    if isinstance(inputs, tuple | list) and isinstance(targets, tuple | list):
        return inputs[0], targets[1]
    if inputs is None or targets is None or isinstance(inputs, tuple | list) or isinstance(targets, tuple | list):
        raise DataError("of inputs and data.targets, held_out() returns different things; both must hold the same back")
    return OwnTargets(inputs, targets)
