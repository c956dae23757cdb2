"""Files of tensors by names: which forms they have, and their values, row by row, without reading the others.

*.safetensors    a header, which safetensors checks, and the tensors
*.pt, *.pth      what torch.save made of a state dict; nothing but tensors is unpickled (weights_only)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.retry import lacks_memory

Form = tuple[tuple[int, ...], torch.dtype]
Rows = slice | EllipsisType  # of dimension 0; all of a tensor that has none
Values = Callable[[str, Rows], torch.Tensor]  # of a name and some rows; in the file's memory, while it is open

SAFETENSORS, TORCH = (".safetensors",), (".pt", ".pth")
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def names_in(path: Path) -> list[str]:
    """The names of the tensors in a file. Raises `ModelRefused`."""
    with _readable(path):
        if path.suffix in TORCH:
            return list(_loaded(path))
        with safe_open(path, "pt") as file:
            return list(file.keys())


def forms_in(path: Path, names: set[str]) -> dict[str, Form]:
    """Shape and dtype of those tensors of a file that are in `names`. Raises `ModelRefused`."""
    with _readable(path):
        if path.suffix in TORCH:
            return {name: (tuple(t.shape), t.dtype) for name, t in _loaded(path).items() if name in names}
        with safe_open(path, "pt") as file:
            return {name: _form(path, name, file.get_slice(name)) for name in file.keys() if name in names}  # noqa: SIM118  # no mapping


@contextmanager
def values_in(path: Path) -> Iterator[Values]:
    """A context in which a file is open. What was read of it counts as this process's memory until it is left, and
    nothing that it gave is used any more. Raises `ModelRefused`."""
    with _readable(path):
        if path.suffix in TORCH:
            loaded = _loaded(path)
            yield lambda name, rows: loaded[name][rows]
        else:
            with safe_open(path, "pt") as file:
                yield lambda name, rows: file.get_tensor(name) if rows is ... else file.get_slice(name)[rows]


def _loaded(path: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a file of torch, in the memory of its mapping."""
    found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(found, Mapping):
        raise ModelRefused(f"{path} holds a {type(found).__name__}, not a state dict: save model.state_dict()")
    if odd := [name for name, value in found.items() if not isinstance(value, torch.Tensor)]:
        raise ModelRefused(
            f"{path} holds more than a state dict: {odd[0]!r} is a {type(found[odd[0]]).__name__}, not a tensor. Save "
            f"model.state_dict() alone"
        )
    return found


def _form(path: Path, name: str, stored: Any) -> Form:
    if (dtype := _DTYPES.get(stored.get_dtype())) is None:
        raise ModelRefused(f"{name} in {path} has dtype {stored.get_dtype()}, which no parameter of torch has")
    return tuple(stored.get_shape()), dtype


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """A context whose errors are those of a file that cannot be read."""
    try:
        path.open("rb").close()  # safetensors takes any error for a missing file
        yield
    except ModelRefused:
        raise
    except Exception as error:  # whatever safetensors and torch raise for a damaged file
        if lacks_memory(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelRefused(f"{path} cannot be read: {reason}") from error
