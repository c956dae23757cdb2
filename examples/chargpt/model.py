"""A character-level transformer in plain torch: pre-norm blocks, dropout on, one layer of the list per block."""

import math

import torch
from torch import Tensor, nn

SYMBOLS = 128  # ASCII, one symbol a byte


def build(width: int, heads: int, blocks: int, context: int, dropout: float) -> nn.Sequential:
    """Symbols int64 [rows, context] -> scores of the next symbol at each place, float32 [rows, context, 128]."""
    return nn.Sequential(
        Embedding(width, context, dropout),
        *(Block(width, heads, dropout) for _ in range(blocks)),
        nn.LayerNorm(width),
        nn.Linear(width, SYMBOLS),
    )


def next_symbol_loss(scores: Tensor, symbols: Tensor) -> Tensor:
    """Mean cross entropy in nats: scores [rows, context, 128] against the symbols int64 [rows, context] that came."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), symbols.flatten())


def bits_per_symbol(scores: Tensor, symbols: Tensor) -> Tensor:
    """The same in bits: how long a file would be that this model compresses."""
    return next_symbol_loss(scores, symbols) / math.log(2)


class Embedding(nn.Module):
    """Learned vectors of a symbol and of its place."""

    def __init__(self, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.symbol = nn.Embedding(SYMBOLS, width)
        self.place = nn.Parameter(0.02 * torch.randn(context, width))
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.symbol.weight, std=0.02)

    def forward(self, symbols: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.symbol(symbols) + self.place[: symbols.shape[1]])
        return x


class Block(nn.Module):
    """Looks back (attention), then thinks (a two-layer perceptron); each adds to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x)))
        thought: Tensor = self.dropout(self.perceptron(self.norms[1](x)))
        return x + thought


class Attention(nn.Module):
    """Causal self-attention with several heads (Vaswani et al. 2017, arXiv 1706.03762)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.combine = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.combine(seen.transpose(1, 2).flatten(-2))
        return mixed
