"""Compares a file's tensors with those that a stage needs, and copies them into memory of their own, in pieces.

A mapped file counts as the process's memory where it was read. So each round of pieces maps it for itself:

the file    |· · · · · · · ·|=========|· · · · · · · · · · · ·|    at most `ROUND` bytes of it at a time
memory      |===============|=========|                       |    grows to the stage's own tensors
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stageline.pipeline.plan.keys.key_types import hint

from .tensor_files import Form, Rows, is_mapped, values_in

ROUND = 2**22  # bytes of a mapped file; others are open once
PIECE = 2**20  # bytes


SHOWN = 4  # faults in one error
Twins = Mapping[str, Sequence[str]]  # of a name, in the model's order, all that are one parameter; those alone


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a stored tensor, and how many bytes they are."""

    name: str
    rows: Rows
    bytes: int


def read_into(file: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors of `file` into `targets`, tensors of the same shapes and dtypes, by the names in the file. Raises
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


def sources(wanted: Collection[str], stored: Collection[str], twins: Twins) -> dict[str, str]:
    """By the names that a stage wants, the names under which they are stored. Of names that are one parameter, the last
    counts: a state dict that has all is loaded in that order."""
    candidates = {name: [each for each in twins.get(name, (name,)) if each in stored] for name in wanted}
    return {name: found[-1] for name, found in candidates.items() if found}


def misnamed(wanted: Collection[str], stored: Collection[str], twins: Twins, known: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with the names in a file. `known` are those of all stages."""
    located = sources(wanted, stored, twins)
    absent = [name for name in wanted if name not in located]
    strange = [name for name in stored if name not in known]
    for number, name in enumerate(absent):
        yield f"{name} is missing{_hint(name, strange, number)}"
    for number, name in enumerate(strange, len(absent)):
        yield f"{name} is not the model's{_hint(name, absent, number)}"


def misformed(wanted: Mapping[str, torch.Tensor], forms: Mapping[str, Form]) -> Iterator[str]:
    """Yield what is wrong with shapes and dtypes; `forms` are by the names of `wanted`."""
    for name, tensor in wanted.items():
        shape, dtype = forms[name]
        if shape != tuple(tensor.shape):
            yield f"{name} has shape {shape} there, the model wants {tuple(tensor.shape)}"
        elif dtype != tensor.dtype:
            yield (
                f"{name} has dtype {dtype} there, the model wants {tensor.dtype}: let the factory return "
                f"model.to({dtype}), or save the weights with {tensor.dtype}"
            )


def listed(faults: Sequence[str]) -> str:
    """The first faults, and how many more there are."""
    more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return "; ".join(faults[:SHOWN]) + more


def _hint(name: str, names: Collection[str], number: int) -> str:
    """Of a fault that is shown; to look for all would take long."""
    return hint(name, names) if number < SHOWN else ""
