"""What a data source is: (seed, step) gives a batch, the same on every machine."""

from typing import Protocol

import torch

from stageline.pipeline.errors import DataError, describe_error, raised_by_user_code

from .batch import Batch


class Source(Protocol):
    """A data source. Two sources with the same arguments return the same batches, bit for bit.

    It may also have a method `samples(step)`, which returns the numbers in its data set of the rows of `batch(step)`:
    int64 [rows].
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


def samples_of(source: Source, step: int) -> torch.Tensor | None:
    """What `source.samples(step)` returns: int64 [rows]; None if the source has no such method. Raises `DataError`."""
    asked = getattr(source, "samples", None)
    if asked is None:
        return None
    try:
        found = asked(step)
    except BaseException as error:  # user code may raise anything; the cause is chained
        if isinstance(error, DataError) or not raised_by_user_code(error):
            raise
        raise DataError(f"the data source's samples({step}) failed: {describe_error(error)}") from error
    if isinstance(found, torch.Tensor) and found.dtype == torch.int64 and found.dim() == 1:
        return found
    raise DataError(f"the data source's samples({step}) returned no int64 tensor of one dimension, but {found!r:.80}")
