"""Checksums of what a trial draws and computes, leaf by leaf; of a batch also row by row."""

import ctypes
from collections.abc import Iterator

import torch
from zlib_ng.zlib_ng import crc32

from stageline.pipeline.tree import Leaf, Tree, describe, leaves

from .transcript import ROWS, LeafRecord


def record(tree: Tree, name: str, *, by_row: bool = False) -> Iterator[LeafRecord]:
    """Each leaf of `tree`, whose names begin with `name`."""
    return (_record(leaf, f"{name}{path}", by_row=by_row) for path, leaf in leaves(tree))


def _record(leaf: Leaf, name: str, *, by_row: bool) -> LeafRecord:
    if not isinstance(leaf, torch.Tensor) or leaf.is_meta or leaf.layout != torch.strided:  # there are no bytes
        return LeafRecord(name, describe(leaf))
    memory = _memory(leaf)
    rows = leaf.shape[0] if by_row and leaf.dim() else 0
    return LeafRecord(name, describe(leaf), crc32(memory), _rows(memory, rows))


def _rows(memory: memoryview, rows: int) -> tuple[int, ...]:
    each = len(memory) // rows if rows else 0
    return tuple(crc32(memory[row * each : (row + 1) * each]) for row in range(min(rows, ROWS)))


def _memory(tensor: torch.Tensor) -> memoryview:
    """Its bytes, in the order of its elements."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    held = (ctypes.c_ubyte * raw.numel()).from_address(raw.data_ptr())
    held.tensor = raw  # type: ignore[attr-defined]  # keeps the memory alive
    return memoryview(held).cast("B")
