"""Text that every machine has: files of Python's standard library, cut into windows of equal length.

Machines that train together need the same version of Python, or they would read different texts.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from stageline import Rows

LIBRARY = Path(os.__file__).parent
FILES = ("argparse", "difflib", "doctest", "inspect", "optparse", "pdb", "pydoc", "subprocess", "tarfile", "typing")


def batches(batch_size: int, seed: int, *, context: int, keep_back_one_in: int) -> Rows:
    """Symbols int64 [rows, context], and the ones that come next, int64 [rows, context].

    One window in `keep_back_one_in` is held out.
    """
    text = "\n".join((LIBRARY / f"{name}.py").read_text(encoding="utf-8") for name in FILES)
    inputs, targets = windows(symbols(text), context)
    kept = torch.arange(len(inputs)) % keep_back_one_in == 0
    return Rows(inputs[~kept], targets[~kept], batch_size, seed, held_out=(inputs[kept], targets[kept]))


def symbols(text: str) -> Tensor:
    """One int64 below 128 for each character."""
    codes = bytearray(text.encode("ascii", errors="replace"))  # "?" for what is not ASCII
    return torch.frombuffer(codes, dtype=torch.uint8).to(torch.int64)


def windows(text: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Windows side by side, and the same windows one symbol later."""
    rows = (len(text) - 1) // context
    return text[: rows * context].reshape(rows, context), text[1 : rows * context + 1].reshape(rows, context)
