"""Dropout (random numbers), batch norm (buffers), and a layer that takes its time so that something can happen."""

from time import sleep

from torch import Tensor, nn


class Slow(nn.Module):
    """Passes on what it is given, a few milliseconds later."""

    seconds = 0.012

    def forward(self, x: Tensor) -> Tensor:
        sleep(self.seconds)
        return x


def build() -> nn.Sequential:
    return nn.Sequential(
        *(Slow(), nn.Linear(5, 8)),
        *(Slow(), nn.Dropout(0.2)),
        *(Slow(), nn.BatchNorm1d(8)),
        *(Slow(), nn.Linear(8, 3)),
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()
