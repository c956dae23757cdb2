"""Parts of a collated batch: the inputs and the targets, as trees of tensors.

pair (x, y)                                inputs x                           targets y
dict, target="labels"                      inputs the other parts             targets batch["labels"]
tuple of three, target=2                   inputs (batch[0], batch[1])        targets batch[2]
anything, target=function                  inputs, targets = function(batch)
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from stageline.pipeline.data.batch import Batch, rows
from stageline.pipeline.data.source import called
from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import Tree

Part: TypeAlias = str | int
Target: TypeAlias = Part | Sequence[Part] | Callable[[Any], tuple[Any, Any]] | None

_ALIGNMENT = 64  # bytes; kernels choose by it, and bits follow
_PAIR = "return pairs (inputs, targets) from the dataset, or say which part is the target"


def split_parts(batch: Any, target: Target) -> Batch:
    """Return the inputs and targets of a collated batch.

    Sequences become tuples. Tensors are dense, aligned, and carry no gradient.

    Args:
        batch: Result of the collate function.
        target: Name or place of the part that is the target, a list of these, or a function that returns both. None for
            the second part of a pair.

    Raises:
        DataError: The batch has no such parts, or inputs and targets have different numbers of rows.
    """
    inputs, targets = _by_function(batch, target) if callable(target) else _by_name(batch, target)
    parts = as_tree(inputs, "inputs"), as_tree(targets, "targets")
    rows(parts)
    return parts


def _by_function(batch: Any, function: Callable[[Any], tuple[Any, Any]]) -> tuple[Any, Any]:
    made = called(partial(function, batch), "target", f"failed on {form(batch)}")
    if not (isinstance(made, tuple | list) and len(made) == 2):
        raise DataError(f"target returned {form(made)}; expected two: (inputs, targets)")
    inputs, targets = made
    return inputs, targets


def _by_name(batch: Any, target: Part | Sequence[Part] | None) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        return _of_mapping(batch, target)
    if isinstance(batch, tuple | list):
        return _of_sequence(batch, target)
    raise DataError(f"a batch is {form(batch)}: {_PAIR}, such as target=lambda x: (x, x)")


def _of_mapping(batch: Mapping[Any, Any], target: Part | Sequence[Part] | None) -> tuple[Any, Any]:
    names = [target] if isinstance(target, str | int) else list(target or ())
    there = ", ".join(map(repr, batch))
    if not names:
        raise DataError(f"a batch has the parts {there}: say which is the target, such as target={[*batch][-1]!r}")
    if missing := [name for name in names if name not in batch]:
        raise DataError(f"target={target!r}: a batch has no {missing[0]!r}. It has {there}.")
    left = {name: part for name, part in batch.items() if name not in names}
    if not left:
        raise DataError(f"target={target!r} leaves no inputs: a batch has only {there}")
    named = batch[names[0]] if isinstance(target, str | int) else {name: batch[name] for name in names}
    return (next(iter(left.values())) if len(left) == 1 else left), named


def _of_sequence(batch: Sequence[Any], target: Part | Sequence[Part] | None) -> tuple[Any, Any]:
    count = len(batch)
    if target is None and count != 2:
        raise DataError(f"a batch is {form(batch)}: {_PAIR}, such as target={count - 1}")
    places = [target] if isinstance(target, str | int) else [1] if target is None else list(target)
    if wrong := [place for place in places if not isinstance(place, int) or not -count <= place < count]:
        raise DataError(f"target={target!r}: a batch has {count} parts, 0 to {count - 1}, and none is {wrong[0]!r}")
    places = [int(place) % count for place in places]
    left = [part for place, part in enumerate(batch) if place not in places]
    if not left:
        raise DataError(f"target={target!r} leaves no inputs: a batch has only {count} parts")
    one = target is None or isinstance(target, str | int)
    named = batch[int(places[0])] if one else tuple(batch[int(place)] for place in places)
    return (left[0] if len(left) == 1 else tuple(left)), named


def as_tree(value: Any, name: str) -> Tree:
    """Return `value` as a tree that can be cut into microbatches. Raises `DataError`, which calls the value `name`."""
    if isinstance(value, torch.Tensor):
        return _settled(value, name)
    if type(value).__module__ == "numpy":
        return _settled(torch.as_tensor(value), name)
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise DataError(f"{name} has the key {odd[0]!r}: name its parts by texts")
        return {key: as_tree(part, f"{name}[{key!r}]") for key, part in value.items()}
    if isinstance(value, tuple | list):
        if value and isinstance(value[0], str | bytes):
            raise DataError(f"{name} is {len(value)} texts, which no tensor holds: leave them out with target=function")
        return tuple(as_tree(part, f"{name}[{place}]") for place, part in enumerate(value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise DataError(f"{name} is {form(value)}: give tensors, or a collate_fn that makes them")


def form(value: Any) -> str:
    """Describe `value` for people: "(float32 [3, 4], int)"."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {form(part)}' for key, part in value.items())}}}"
    if isinstance(value, tuple | list):
        more = ", ..." if len(value) > _SHOWN else ""
        return f"({', '.join(map(form, value[:_SHOWN]))}{more})"
    shape = getattr(value, "shape", None)
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return name if shape is None or callable(shape) else f"{name} {list(shape)}"


_SHOWN = 6  # parts of a sequence


def _settled(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return `tensor` with one layout and alignment wherever the batch was drawn, since kernels choose by them."""
    if not tensor.is_cpu or tensor.layout != torch.strided or tensor.is_nested:
        what = f"on {tensor.device}" if not tensor.is_cpu else f"of layout {tensor.layout}"
        raise DataError(f"{name} is a tensor {what}: give dense ones on the CPU; a stage moves them to its device")
    data = tensor.detach()
    lazy = data.is_conj() or data.is_neg()
    return data if data.is_contiguous() and data.data_ptr() % _ALIGNMENT == 0 and not lazy else _copied(data)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense copy of `tensor`; dimensions keep their order in memory if the tensor is dense already."""
    return tensor.resolve_conj().resolve_neg().clone()
