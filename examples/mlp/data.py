"""The notebook's data: random features, random classes, and slices of rows of which every tenth is peculiar."""

import torch

from stageline import Batch

ROWS, FEATURES = 320, 16


class Slices:
    """Step i trains on rows `[i * batch_size % 320 : (i + 1) * batch_size % 320]`.

    With 32 rows a batch the tenth slice is `[288:0]`, which is empty: the step must pass through and change nothing.
    With `short_tenth` it is `[288:-1]`, 31 rows, as in the notebook's asynchronous variant.
    """

    def __init__(self, batch_size: int, seed: int, *, short_tenth: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._inputs = torch.rand([ROWS, FEATURES], generator=generator)
        self._targets = torch.randint(0, 2, [ROWS, 1], generator=generator, dtype=torch.float32)
        self._batch_size = batch_size
        self._wrapped_end = -1 if short_tenth else 0

    @property
    def steps_per_epoch(self) -> int:
        return ROWS // self._batch_size

    def batch(self, step: int) -> Batch:
        start = step * self._batch_size % ROWS
        end = (step + 1) * self._batch_size % ROWS or self._wrapped_end
        return self._inputs[start:end], self._targets[start:end]

    def held_out(self) -> Batch | None:
        return None


batches = Slices
