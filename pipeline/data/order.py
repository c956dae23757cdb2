"""Which rows each step has. The order of an epoch follows from the seed and the epoch alone.

step 7, 3 steps an epoch          epoch 2, place 1:  rows 4..7 of the epoch's order
batch_size 4, 10 rows             [ . . . . | 4 5 6 7 | . . ]    the last batch is smaller, never dropped
"""

from functools import lru_cache
from hashlib import sha256

import torch

from stageline.pipeline.errors import DataError


class Order:
    """The order of `count` rows (at least 1), `batch_size` a step. Raises `DataError` for a `batch_size` below 1."""

    def __init__(self, count: int, batch_size: int, seed: int, *, shuffle: bool) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}. Give each batch at least one row.")
        self.count, self.batch_size, self.seed, self.shuffle = count, batch_size, seed, shuffle
        # Stages on one worker are a few steps apart, so between two epochs both orders are in use.
        self._of_epoch = lru_cache(maxsize=2)(self._draw)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.count // self.batch_size)

    def place(self, step: int) -> tuple[int, slice]:
        """The epoch of `step`, and its place in the order of that epoch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return epoch, slice(place * self.batch_size, (place + 1) * self.batch_size)

    def rows(self, step: int) -> torch.Tensor:
        """The numbers of the rows of `step`: int64 [rows]."""
        epoch, here = self.place(step)
        return self._of_epoch(epoch)[here]

    def _draw(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.count)
        key = sha256(f"{self.seed}/epoch {epoch}".encode()).digest()[:8]
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(int.from_bytes(key, "little")))
