"""Layers of which the first ones are pure functions of a sample: the norm there has the statistics that it has."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, LENGTH, WIDTH = 11, 5, 6


class Paired(nn.Module):
    """Gives two tensors and a number, as a cut between any two layers may have to send."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor | int]]:
        return x, {"mask": x.sum(2) > 0, "heads": 2}


class Joined(nn.Module):
    """Takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, parts: tuple[Tensor, dict[str, Tensor | int]]) -> Tensor:
        x, more = parts
        return (x @ self.weight) * more["mask"].unsqueeze(2) / more["heads"]


def build() -> nn.Sequential:
    norm = nn.BatchNorm1d(LENGTH)
    norm.running_mean.uniform_(-1, 1)
    layers = OrderedDict(
        embed=nn.Embedding(WORDS, WIDTH),
        first=nn.Linear(WIDTH, WIDTH),
        act=nn.ReLU(inplace=True),
        norm=norm.eval(),
        pair=Paired(),
        join=Joined(),
        later=nn.BatchNorm1d(LENGTH),
        drop=nn.Dropout(0.2),
        head=nn.Linear(WIDTH, WORDS),
    )
    return nn.Sequential(layers)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.transpose(1, 2), targets)


def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(2) != targets).float().mean()
