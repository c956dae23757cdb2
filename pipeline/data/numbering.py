"""Which samples each microbatch has: their numbers are cut as the rows of the batch are.

samples of batches 0 and 1     [7 2 9 4] [0 5 1 8]      accumulate = 2, 2 microbatches of each
microbatches of step 0         [7 2] [9 4] [0 5] [1 8]
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch

from stageline.pipeline.errors import DataError

Samples = Callable[[int], torch.Tensor]  # of a batch's number: int64 [rows]


class Numbering:
    """`samples` are those of a batch, of which a step has `accumulate`, each in so many `microbatches`."""

    def __init__(self, samples: Samples, microbatches: int, accumulate: int = 1) -> None:
        self._samples = samples
        self._microbatches = microbatches
        self._accumulate = accumulate
        self._of_batch = lru_cache(maxsize=4)(self._cut)

    def microbatch(self, step: int, microbatch: int) -> torch.Tensor:
        """The samples of a microbatch: int64 [rows]. Raises `DataError` as `checked` does."""
        batch, place = divmod(microbatch, self._microbatches)
        return self._of_batch(step * self._accumulate + batch)[place]

    def count(self, steps: int) -> int:
        """One more than the highest number among the samples of the first `steps` steps."""
        return 1 + max((int(found.max()) for found in self.batches(steps) if len(found)), default=-1)

    def batches(self, steps: int) -> Iterator[torch.Tensor]:
        """The samples of each batch of the first `steps` steps."""
        return map(self._checked, range(steps * self._accumulate))

    def _cut(self, batch: int) -> tuple[torch.Tensor, ...]:
        return self._checked(batch).tensor_split(self._microbatches)

    def _checked(self, batch: int) -> torch.Tensor:
        return checked(self._samples(batch), batch)


def checked(found: object, batch: int) -> torch.Tensor:
    """The samples of a batch, as a source gives them. Raises `DataError` for what are no numbers of samples."""
    if isinstance(found, torch.Tensor) and found.dtype is torch.int64 and found.dim() == 1 and not (found < 0).any():
        return found
    wrong = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
    raise DataError(f"the data source's samples({batch}) is {wrong}; wanted are numbers from 0 on, int64 [rows]")
