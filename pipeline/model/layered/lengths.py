"""Lengths of tensors that a forward asks for by `len(x)`, left open while torch.export traces.

Python's `len` gives a number, and a graph is then for that number of rows; `x.shape[0]` gives a size that is left open.
"""

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def len_left_open(model: torch.nn.Module) -> Iterator[None]:
    """Let `len(x)` of a tensor be `x.shape[0]`, in the context, in the files of the model's own classes."""
    files = {type(module).__module__ for module in model.modules()}
    tables = [vars(sys.modules[file]) for file in files if file in sys.modules and file.partition(".")[0] != "torch"]
    tables = [table for table in tables if "len" not in table]
    for table in tables:
        table["len"] = _length
    try:
        yield
    finally:
        for table in tables:
            del table["len"]


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else builtins.len(value)
