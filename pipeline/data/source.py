"""What a data source is: (seed, step) gives a batch, the same on every machine."""

from typing import Protocol

from torch import Tensor

from .batch import Batch


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

    def held_out(self) -> "Batch | Source | None":
        """Rows that are in no batch, to evaluate the trained model on; None if there are none. Of a source, the batches
        of one epoch are evaluated, each drawn when its turn comes."""


class NumberedSource(Source, Protocol):
    """A source that knows which samples each batch has, as `model.prefix_cache` needs. `Rows` and `Loader` are such."""

    def samples(self, step: int) -> Tensor:
        """The numbers of the samples in `batch(step)`, in the order of its rows: int64 [rows], from 0 on. A number
        stands for the same inputs in all epochs."""
