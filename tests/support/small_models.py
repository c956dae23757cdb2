"""Models of a few layers, with what training loops treat in ways of its own: norms, biases, dropout, statistics."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class SmallModel:
    """`cut` makes three stages of what `build` returns."""

    build: Callable[[], nn.Sequential]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]  # of a number, and of rows
    loss: Callable[[Tensor, Tensor], Tensor]
    cut: tuple[int, ...]


class TransformerLayer(nn.Module):
    """A transformer's layer, norms first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(17, 8), TransformerLayer(8), TransformerLayer(8), nn.LayerNorm(8), nn.Linear(8, 17)
    )


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    layers = {
        "conv1": nn.Conv2d(3, 4, 3, padding=1),
        "norm": nn.BatchNorm2d(4),
        "relu": nn.ReLU(),
        "conv2": nn.Conv2d(4, 6, 3, stride=2),
        "flat": nn.Flatten(),
        "drop": nn.Dropout(0.2),
        "head": nn.Linear(54, 5),
    }
    return nn.Sequential(OrderedDict(layers))


def _words(number: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randint(17, (rows, 6), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def _images(number: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(5, (rows,), generator=generator)


def next_word(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.transpose(1, 2), targets)


SMALL_MODELS = {
    "transformer": SmallModel(transformer, _words, next_word, (1, 3)),
    "convolutions": SmallModel(convolutions, _images, cross_entropy, (2, 4)),
}
