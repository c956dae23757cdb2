"""Batches of nine rows, which four microbatches share unevenly."""

from dataclasses import dataclass

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
COUNT = 6


@dataclass(frozen=True)
class FewBatches:
    """So many batches, drawn by a seed; two of them are held out as well."""

    drawn: list[Batch]

    @property
    def steps_per_epoch(self) -> int:
        return len(self.drawn)

    def batch(self, step: int) -> Batch:
        return self.drawn[step % len(self.drawn)]

    def held_out(self) -> Batch:
        return self.drawn[0]


def batches(batch_size: int, seed: int) -> FewBatches:
    draw = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(batch_size, 6, generator=draw) for _ in range(COUNT)]
    return FewBatches([(x, torch.randint(0, 3, (batch_size,), generator=draw)) for x in inputs])
