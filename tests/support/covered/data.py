"""Batches of nine rows, which four microbatches share unevenly."""

from dataclasses import dataclass

import torch
from torch import Tensor

from support.covered.model import WORDS

Batch = tuple[Tensor, Tensor]
COUNT = 6


@dataclass(frozen=True)
class FewBatches:
    """So many batches, drawn by a seed; the first of them is held out as well."""

    drawn: list[Batch]

    @property
    def steps_per_epoch(self) -> int:
        return len(self.drawn)

    def batch(self, step: int) -> Batch:
        return self.drawn[step % len(self.drawn)]

    def held_out(self) -> Batch:
        return self.drawn[0]


def batches(batch_size: int, seed: int, kind: str = "linear") -> FewBatches:
    draw = torch.Generator().manual_seed(seed)
    words = [torch.randint(0, WORDS, (batch_size, 6), generator=draw) for _ in range(COUNT)]
    if kind == "transformer":
        return FewBatches([(each[:, :-1], each[:, 1:] % 5) for each in words])
    inputs = [torch.randn(batch_size, 6, generator=draw) for _ in range(COUNT)]
    return FewBatches([(x, torch.randint(0, 3, (batch_size,), generator=draw)) for x in inputs])
