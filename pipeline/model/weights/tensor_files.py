"""Files of tensors by names: which forms they have, and their values, row by row, without reading the others.

*.safetensors    a header, which safetensors checks, and the tensors
*.pt, *.pth      what torch.save made of a state dict; nothing but tensors is unpickled (weights_only)
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.printable import printable_line
from stageline.pipeline.retry import lacks_memory

Form = tuple[tuple[int, ...], torch.dtype]
Rows = slice | EllipsisType  # of dimension 0; all of a tensor that has none
Values = Callable[[str, Rows], torch.Tensor]  # of a name and some rows; in the file's memory, while it is open

SAFETENSORS, TORCH = (".safetensors",), (".pt", ".pth")
_AGAIN = "write it with torch.save(model.state_dict(), path), or with safetensors"
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
    if not is_zipfile(path):
        raise ModelRefused(f"{path.name} is not a whole file of torch.save, or it is of torch before 1.6: {_AGAIN}")
    found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(found, Mapping):
        raise ModelRefused(f"{path.name} holds a {type(found).__name__}, not a state dict: {_AGAIN}")
    if odd := [name for name, value in found.items() if not isinstance(value, torch.Tensor)]:
        raise ModelRefused(
            f"{path.name} holds more than a state dict: {odd[0]!r} is a {type(found[odd[0]]).__name__}, not a tensor. "
            "Save model.state_dict() alone"
        )
    return found


def _form(path: Path, name: str, stored: Any) -> Form:
    if (dtype := _DTYPES.get(stored.get_dtype())) is None:
        raise ModelRefused(f"{name} in {path.name} has dtype {stored.get_dtype()}, which no parameter of torch has")
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
        raise ModelRefused(f"{path.name} {printable_line(_fault(error))}") from error


def _fault(error: Exception) -> str:
    """What is wrong with a file whose reading raises `error`."""
    text = str(error).strip()
    if text.startswith("Weights only load failed"):  # and goes on with how to load it all the same
        named = re.search(r"GLOBAL (\S+)", text)
        what = f"a {named[1]} in it" if named else "more than tensors in it, or is damaged"
        return f"has {what}; nothing but tensors is unpickled: {_AGAIN}"
    return f"cannot be read, so it may be damaged or cut off: {(text.splitlines() or [type(error).__name__])[0]}"
