"""Copies tensors from files into memory of their own, in pieces.

A mapped file counts as the process's memory where it was read. So each round of pieces maps it for itself:

the file    |· · · · · · · ·|=========|· · · · · · · · · · · ·|    at most `ROUND` bytes of it at a time
memory      |===============|=========|                       |    grows to the stage's own tensors
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from .tensor_files import Rows, is_mapped, values_in

ROUND = 2**22  # bytes of a mapped file; others are open once
PIECE = 2**20  # bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a stored tensor, and how many bytes they are."""

    name: str
    rows: Rows
    bytes: int


def read_into(file: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Copies tensors of `file` into `targets`, tensors of the same shapes and dtypes, by the names in the file. Raises
    `ModelRefused`."""
    pieces = [piece for name, target in targets.items() for piece in pieces_of(name, target)]
    with torch.no_grad():
        for group in rounds(pieces) if is_mapped(file) else [pieces]:
            with values_in(file) as values:
                for piece in group:
                    targets[piece.name][piece.rows].copy_(values(piece.name, piece.rows))


def pieces_of(name: str, target: torch.Tensor) -> Iterator[Piece]:
    """All rows of `target`, in pieces of at most `PIECE` bytes, or of one row."""
    size = target.numel() * target.element_size()
    if not target.dim() or size <= PIECE:
        yield Piece(name, ..., size)
        return
    row = size // len(target)
    step = max(1, PIECE // row)
    for low in range(0, len(target), step):
        high = min(low + step, len(target))
        yield Piece(name, slice(low, high), (high - low) * row)


def rounds(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The pieces in order, in groups of at most `ROUND` bytes, or of one piece."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and size + piece.bytes > ROUND:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.bytes
    if group:
        yield group
