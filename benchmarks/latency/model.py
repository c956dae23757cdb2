"""Layers that compute, and besides wait: for `forward` seconds, and in their backward for twice as long.

So four workers on two processors take as long as on four.
"""

import sys
from pathlib import Path
from time import sleep

import torch
from torch import Tensor, nn

from stageline import Rows

WIDTH = 64
ROWS = 4  # of a microbatch


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds  # type: ignore[attr-defined]
        sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        sleep(2 * context.seconds)  # type: ignore[attr-defined]
        return gradient, None


class TimedLayer(nn.Module):
    """A linear layer that takes `seconds` forward, and twice as long backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """float32 [rows, WIDTH] -> float32 [rows, WIDTH]."""
        waited: Tensor = _Waits.apply(self.linear(x).tanh(), self.seconds)
        return waited


def build(stages: int, forward: float, latency: float) -> nn.Sequential:
    """A layer for each stage; `latency`, one way, is that of the links between workers. Times in seconds."""
    if latency:
        sys.path.append(str(Path(__file__).parents[2]))
        from benchmarks.latency.delayed_link import delay_links

        delay_links(latency)
    return nn.Sequential(*(TimedLayer(forward) for _ in range(stages)))


def batches(batch_size: int, seed: int) -> Rows:
    """Rows at random, of which each step takes the next."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(8 * batch_size, WIDTH, generator=generator) for _ in range(2))
    return Rows(inputs, targets, batch_size, seed)
