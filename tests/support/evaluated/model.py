"""Dropout (random numbers) and batch norm (buffers): what evaluation must neither use nor change."""

from time import sleep

import torch
from torch import Tensor, nn


class Pausing(nn.Tanh):
    """Takes `seconds` longer, so that something can happen meanwhile."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        sleep(self.seconds)
        return super().forward(x)


def build(seconds: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(5, 8), nn.Dropout(0.4)),
        *(nn.BatchNorm1d(8), Pausing(seconds)),
        *(nn.Linear(8, 6), nn.Linear(6, 3)),
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def highest(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.max(1).values.mean()


def never(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.tensor(float("nan"))


def late(outputs: Tensor, targets: Tensor) -> Tensor:
    """No number while the outputs are small."""
    return outputs.mean() if outputs.max() > 0.3 else torch.tensor(float("nan"))
