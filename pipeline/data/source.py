"""What a data source is: (seed, step) gives a batch, the same on every machine."""

from typing import Protocol

import torch

from stageline.pipeline.errors import DataError, describe_error, raised_by_user_code

from .batch import Batch


class Source(Protocol):
    """A data source. Two sources with the same arguments return the same batches, bit for bit.

    One that also says which samples its batches have is a `NumberedSource`.
    """

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the data, including a smaller last one; at least 1."""

    def batch(self, step: int) -> Batch:
        """The inputs and targets of `step`, which counts from 0 over all epochs. Steps may be asked for in any order,
        and more than once.

        Dimension 0 of every tensor is rows; there may be none. Must neither read nor change global random state.
        """

    def held_out(self) -> "Batch | Source | None":
        """Rows that are in no batch, to evaluate the trained model on; None if there are none. Of a source, the batches
        of one epoch are evaluated, each drawn when its turn comes."""


class NumberedSource(Source, Protocol):
    """A source that knows which samples each batch has, as `model.prefix_cache` needs, and as taps
    store. `Rows` and `Loader` are such."""

    def samples(self, step: int) -> torch.Tensor:
        """The numbers of the samples in `batch(step)`, in the order of its rows: int64 [rows], from 0 on. A number
        stands for the same inputs in all epochs."""


def samples_of(source: NumberedSource, step: int) -> torch.Tensor:
    """What `source.samples(step)` returns: int64 [rows]. Raises `DataError` if it fails, or returns something else."""
    try:
        found: object = source.samples(step)
    except DataError:
        raise
    except BaseException as error:  # user code may raise anything; the cause is chained
        if not raised_by_user_code(error):
            raise
        raise DataError(f"the data source's samples({step}) failed: {describe_error(error)}") from error
    if isinstance(found, torch.Tensor) and found.dtype is torch.int64 and found.dim() == 1 and not (found < 0).any():
        return found
    wrong = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
    raise DataError(f"the data source's samples({step}) is {wrong}; expected numbers from 0 on, int64 [rows]")
