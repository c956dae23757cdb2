"""Example of a model's inputs without their values, kept with a run, so that a line which resumes it can trace again.

example.json    {"structure": [3, "input_ids", [0]], "tensors": [["int64", [4, 32]]]}

The structure is that of messages: containers, names and plain values of the inputs, with a place for each tensor.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from stageline.broker.codec.structure import Structure, count_tensors, flatten, unflatten
from stageline.broker.errors import BrokerError
from stageline.pipeline.tree import Tree, tensors
from stageline.workers.disk.atomic_file import write_file, write_json

NAME = "example.json"
_DEPTH = 32  # containers in containers


class _Kept(msgspec.Struct, frozen=True):
    """Structure of the inputs, and dtype and shape of each tensor."""

    structure: Structure
    tensors: list[tuple[str, list[int]]]


def keep_example(folder: Path, example: Tree) -> None:
    """Write the structure of `example` into a run's folder; no value of a tensor is written. Raises `OSError`."""
    structure, _ = flatten(example, _DEPTH)
    kept = [(str(each.dtype).removeprefix("torch."), list(each.shape)) for each in tensors(example)]
    write_json(folder / NAME, _Kept(structure, kept))


def carry_example(run: Path, folder: Path) -> None:
    """Copy the example of the run in `run`, if it has one, to a checkpoint in `folder`. Raises `OSError`."""
    with suppress(FileNotFoundError):
        write_file(folder / NAME, (run / NAME).read_bytes())


def kept_examples(folder: Path) -> list[Tree]:
    """Return inputs like the example that a run's folder has: ones, and zeros for a model that takes no ones.

    Returns none if no example is there, or it cannot be read.
    """
    try:
        kept = msgspec.json.decode((folder / NAME).read_bytes(), type=_Kept)
        if count_tensors(kept.structure, _DEPTH) != len(kept.tensors):
            return []
        return [unflatten(kept.structure, _filled(kept, value)) for value in (1, 0)]
    except (OSError, msgspec.MsgspecError, BrokerError, AttributeError, TypeError, RuntimeError):
        return []


def _filled(kept: _Kept, value: int) -> Iterator[torch.Tensor]:
    for name, shape in kept.tensors:
        yield torch.full(shape, value, dtype=getattr(torch, name))
