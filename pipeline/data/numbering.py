"""Which samples each microbatch has: their numbers are cut as the rows of the batch are.

samples of batches 0 and 1     [7 2 9 4] [0 5 1 8]      accumulate = 2, 2 microbatches of each
microbatches of step 0         [7 2] [9 4] [0 5] [1 8]
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch

Samples = Callable[[int], torch.Tensor]  # of a batch's number: int64 [rows]


class Numbering:
    """`samples` are those of a batch, of which a step has `accumulate`, each in so many `microbatches`."""

    def __init__(self, samples: Samples, microbatches: int, accumulate: int = 1) -> None:
        self._samples = samples
        self._microbatches = microbatches
        self._accumulate = accumulate
        self._of_batch = lru_cache(maxsize=4)(self._cut)

    def microbatch(self, step: int, microbatch: int) -> torch.Tensor:
        """The samples of a microbatch: int64 [rows]. Raises `DataError` as `samples` does."""
        batch, place = divmod(microbatch, self._microbatches)
        return self._of_batch(step * self._accumulate + batch)[place]

    def count(self, steps: int) -> int:
        """One more than the highest number among the samples of the first `steps` steps."""
        return 1 + max((int(found.max()) for found in self.batches(steps) if len(found)), default=-1)

    def batches(self, steps: int) -> Iterator[torch.Tensor]:
        """The samples of each batch of the first `steps` steps."""
        return map(self._samples, range(steps * self._accumulate))

    def _cut(self, batch: int) -> tuple[torch.Tensor, ...]:
        return self._samples(batch).tensor_split(self._microbatches)
