"""Layers that compute, and besides wait: for `forward` seconds, and in their backward for twice as long, of which half
belongs to the gradient of the input and half to that of the weight.

So four workers on two processors take as long as on four.
"""

import sys
from pathlib import Path
from time import sleep

import torch
from torch import Tensor, nn

from stageline import Rows
from stageline.pipeline.tree import Tree

sys.path.append(str(Path(__file__).parents[2]))  # a worker loads this file by its path

WIDTH = 64
ROWS = 4  # of a microbatch


class _Waits(torch.autograd.Function):
    """Waits for so many seconds in its forward, and for so many in its backward."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: Tensor, there: float, back: float) -> Tensor:
        context.back = back  # type: ignore[attr-defined]
        sleep(there)
        return x.clone()

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        sleep(context.back)  # type: ignore[attr-defined]
        return gradient, None, None


class TimedLayer(nn.Module):
    """A linear layer that takes `seconds` forward, and twice as long backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """float32 [rows, WIDTH] -> float32 [rows, WIDTH]."""
        weight = _Waits.apply(self.linear.weight, 0.0, self.seconds)
        linear = torch.nn.functional.linear(x, weight, self.linear.bias)
        waited: Tensor = _Waits.apply(linear.tanh(), self.seconds, self.seconds)
        return waited


def build(stages: int, forward: float, latency: float) -> nn.Sequential:
    """A layer for each stage; `latency`, one way, is that of the links between workers. Times in seconds."""
    if latency:
        from benchmarks.latency.delayed_link import delay_links

        delay_links(latency)
    return nn.Sequential(*(TimedLayer(forward) for _ in range(stages)))


class GatedRows(Rows):
    """Hands out the rows of a step once the gate in `folder` lets the step begin."""

    folder: Path

    def batch(self, step: int) -> tuple[Tree, Tree]:
        from benchmarks.latency.gate import StepGate

        StepGate(self.folder).pass_into(step)
        return super().batch(step)


def batches(batch_size: int, seed: int, gate: str = "") -> Rows:
    """Rows at random, of which each step takes the next; with a `gate`, a folder, when that allows."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(8 * batch_size, WIDTH, generator=generator) for _ in range(2))
    if not gate:
        return Rows(inputs, targets, batch_size, seed)
    rows = GatedRows(inputs, targets, batch_size, seed)
    rows.folder = Path(gate)
    return rows
