"""Data of `fit.py`: few rows whose targets are half chance, so what is held out is measured better, then worse."""

import torch
from torch import Tensor, nn

Pairs = list[tuple[Tensor, Tensor]]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Dropout(0.1), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def batches() -> Pairs:
    return [_drawn(9, seed) for seed in range(6)]


def held_out() -> Pairs:
    return [_drawn(rows, seed) for seed, rows in enumerate((9, 7, 2), 100)]


def _drawn(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator)
    return x, (x[:, :3] + torch.randn(rows, 3, generator=generator)).argmax(1)
