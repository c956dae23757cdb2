"""Trains a decoder on documents of unlike lengths, packed into rows of one length: `python examples/packed/train.py`.

A row holds several documents, one behind the other. Each token attends to tokens of its own document only: a number
per token says which document it belongs to, and the first layer makes the mask from these numbers once, for all blocks
of all stages. The documents are the docstrings of Python's standard library; nothing is downloaded.
"""

import argparse
import ast
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from stageline import Line

CONTEXT, ROWS, SYMBOLS = 256, 8, 256
NOTHING = -100  # a target that counts for nothing: `cross_entropy` leaves it out
PADDING = -1  # number of the document that padding belongs to

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=60)
arguments.add_argument("--workers", default="processes", help="processes, or inline")


class Embedding(nn.Module):
    """Embeds tokens and their places in their documents, and makes the mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(SYMBOLS, width), nn.Embedding(CONTEXT, width)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return hidden states, float32 (rows, tokens, width), and the mask, bool (rows, 1, tokens, tokens)."""
        documents = batch["documents"]
        same = documents[:, :, None] == documents[:, None, :]
        mask = same.tril()[:, None]  # a token sees itself and the tokens before it in its document
        return self.token(batch["tokens"]) + self.place(batch["places"]), mask


class Block(nn.Module):
    """Pre-norm attention within a document, and a two-layer perceptron; each adds to its input."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.project, self.combine = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, travels: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return new hidden states, and the mask as it came."""
        hidden, mask = travels
        split = self.project(self.norms[0](hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*split, attn_mask=mask)
        hidden = hidden + self.combine(seen.transpose(1, 2).flatten(-2))
        return hidden + self.perceptron(self.norms[1](hidden)), mask


class Head(nn.Module):
    """Scores of the next token: float32 (rows, tokens, 256)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.score = nn.LayerNorm(width), nn.Linear(width, SYMBOLS)

    def forward(self, travels: tuple[Tensor, Tensor]) -> Tensor:
        """Return the scores; the mask ends here."""
        scores: Tensor = self.score(self.norm(travels[0]))
        return scores


def build(width: int = 64, blocks: int = 4) -> nn.Sequential:
    """The decoder: layer 0 embeds, layers 1 to `blocks` are blocks, the last one scores."""
    torch.manual_seed(0)
    return nn.Sequential(Embedding(width), *(Block(width) for _ in range(blocks)), Head(width))


def documents() -> list[bytes]:
    """Docstrings of three modules of the standard library, in their order."""
    library = Path(os.__file__).parent
    trees = [ast.parse((library / f"{name}.py").read_text(encoding="utf-8")) for name in ("argparse", "difflib", "ast")]
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(node) for tree in trees for node in ast.walk(tree) if isinstance(node, holders)]
    return [text.encode("ascii", "replace")[:CONTEXT] for text in found if text]


def packed(texts: Sequence[bytes]) -> list[list[bytes]]:
    """Pack documents into rows of at most `CONTEXT` tokens: each goes into the first row that has room."""
    rows: list[list[bytes]] = []
    for text in sorted(texts, key=len, reverse=True):
        room = next((row for row in rows if sum(map(len, row)) + len(text) <= CONTEXT), None)
        if room is None:
            rows.append(room := [])
        room.append(text)
    return rows


def row_of(texts: Sequence[bytes]) -> dict[str, Tensor]:
    """The tensors of one row, int64 (tokens): tokens, documents, places in the document, and targets."""
    row = {name: torch.full((CONTEXT,), fill) for name, fill in _EMPTY.items()}
    begin = 0
    for number, text in enumerate(texts):
        here = slice(begin, begin + len(text))
        tokens = torch.tensor(list(text))
        row["tokens"][here], row["documents"][here], row["places"][here] = tokens, number, torch.arange(len(text))
        row["targets"][here][:-1] = tokens[1:]  # the last token of a document has no next one
        begin += len(text)
    return row


_EMPTY = {"tokens": 0, "documents": PADDING, "places": 0, "targets": NOTHING}


def batches(steps: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Batches of `ROWS` packed rows, again and again: a dict of inputs, and targets int64 (rows, tokens)."""
    rows = [row_of(texts) for texts in packed(documents())]
    rows = rows[: len(rows) // ROWS * ROWS]
    for step in range(steps):
        chosen = [rows[(step * ROWS + number) % len(rows)] for number in range(ROWS)]
        batch = {name: torch.stack([row[name] for row in chosen]) for name in _EMPTY}
        targets = batch.pop("targets")
        yield batch, targets


def next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, summed over tokens and divided by all places of the rows, so that each token counts the same."""
    return (
        cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=NOTHING, reduction="sum") / targets.numel()
    )


def main(steps: int, workers: str) -> None:
    """Train, and print what packing saves and the losses of the first and the last step."""
    texts = documents()
    print(f"{len(texts)} documents: {len(packed(texts))} packed rows in place of {len(texts)} padded ones")
    model, optimizer = build(), partial(torch.optim.AdamW, lr=2e-3)
    with Line(model, stages=2, loss=next_token_loss, optimizer=optimizer, microbatches=4, workers=workers) as line:  # type: ignore[arg-type]
        losses = [line.step(x, y) for x, y in batches(steps)]
        print(f"loss of step 1 {losses[0].item():.4f}, of step {steps} {losses[-1].item():.4f}")


if __name__ == "__main__":
    given = arguments.parse_args()
    main(given.steps, given.workers)
