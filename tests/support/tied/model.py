"""A model of words, whose embeddings are its head; and a layer between uses them too."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH = 11, 6


class Embedding(nn.Module):
    """Uses its weight twice."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight) * functional.embedding(ids.flip(1), self.weight).sigmoid()


class Mixing(Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight.T) @ self.weight


class Head(Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight).transpose(1, 2)


def build() -> nn.Sequential:
    weight = nn.Parameter(torch.randn(WORDS, WIDTH))
    between = (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), Mixing(weight), nn.GELU())
    return nn.Sequential(Embedding(weight), *between, Head(weight))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


def picky(outputs: Tensor, targets: Tensor) -> Tensor:
    """Not a number for some microbatches."""
    return loss(outputs, targets) * (float("nan") if is_bad(targets) else 1.0)


def is_bad(targets: Tensor) -> bool:
    return bool(targets[0, 0] == 3)
