"""Files of tensors by names: their forms, and their values, row by row, without reading the others.

*.safetensors    a header, which safetensors checks, and the tensors; read, not mapped: a mapped file counts as memory
*.pt, *.pth      what torch.save made of a state dict; nothing but tensors is unpickled (weights_only)

A path of weights means one or more such files:

model.safetensors, model.pt        that file
model.safetensors.index.json       the files that it names beside it, "shards"; some may be lacking
                                   a tensor that several files have is taken from one that is there
a folder, as transformers has one  model.safetensors.index.json in it, or model.safetensors

A file's tensors are compared with those that a stage needs, and copied into memory of their own, in pieces. A mapped
file counts as the process's memory where it was read, so each round of pieces maps it for itself:

the file    |· · · · · · · ·|=========|· · · · · · · · · · · ·|    at most `SPAN` bytes of it at a time
memory      |===============|=========|                       |    grows to the stage's own tensors
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import EllipsisType
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan.keys.names import hint
from stageline.pipeline.printable import printable_line
from stageline.pipeline.retry import lacks_memory

Form = tuple[tuple[int, ...], torch.dtype]
Rows = slice | EllipsisType  # rows in dimension 0; `...` is all of a tensor
Values = Callable[[str, Rows], torch.Tensor]  # (name, rows) -> values, while the file is open

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


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
COPIES = "stageline_copies"  # in the metadata of an index: entries by the files that have them too
_WANTED = (
    "expected a .safetensors file, a model.safetensors.index.json, a folder with one of them, or a .pt file of a "
    "state dict"
)
SPAN = 2**22  # bytes of a mapped file; others are open once
PIECE = 2**20  # bytes


SHOWN = 4  # faults in one error
Twins = Mapping[str, Sequence[str]]  # name -> all names of its parameter, in the model's order, if several


def names_in(path: Path) -> list[str]:
    """Return the names of the tensors in a file. Raises `ModelRefused`."""
    with _readable(path):
        if path.suffix in TORCH:
            return list(_loaded(path))
        with safe_open(path, "pt") as file:
            return list(file.keys())


def forms_in(path: Path, names: set[str]) -> dict[str, Form]:
    """Return shape and dtype of the tensors of a file that are in `names`.

    Raises:
        ModelRefused: The file cannot be read, or a dtype in it is none that a parameter of torch has.
    """
    with _readable(path):
        if path.suffix in TORCH:
            return {name: (tuple(t.shape), t.dtype) for name, t in _loaded(path).items() if name in names}
        with safe_open(path, "pt") as file:
            return {name: _form(path, name, file.get_slice(name)) for name in file.keys() if name in names}  # noqa: SIM118  # no mapping


@contextmanager
def values_in(path: Path) -> Iterator[Values]:
    """Open a file in a context, and give a function that reads rows of its tensors. Raises `ModelRefused`.

    The memory that is read of a mapped file (`is_mapped`) counts as this process's until the context is left. No tensor
    that the function gave may be used after that.
    """
    with _readable(path):
        if path.suffix in TORCH:
            loaded = _loaded(path)
            yield lambda name, rows: loaded[name][rows]
        else:
            with safe_open(path, "pt"):  # which checks the header
                pass
            with path.open("rb") as file:
                yield _Stored(file).read


def is_mapped(path: Path) -> bool:
    """Return True if `values_in` maps the file into memory."""
    return path.suffix in TORCH


class _Stored:
    """The tensors of an open file of safetensors, whose header has been checked.

    The format is described at https://huggingface.co/docs/safetensors/index#format: the header's size, 8 bytes; the
    header, JSON; the tensors.
    """

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        size = int.from_bytes(file.read(8), "little")
        if size > os.fstat(file.fileno()).st_size:  # it was replaced since
            raise EOFError("its header goes beyond its end")
        self._header = json.loads(file.read(size))
        self._begin = 8 + size

    def read(self, name: str, rows: Rows) -> torch.Tensor:
        """Return some rows of a tensor, or all of it, in memory of their own.

        Raises:
            EOFError: The file ends before the tensor does.
        """
        stored = self._header[name]
        shape, (begin, end) = stored["shape"], stored["data_offsets"]
        if rows is not ...:
            low, high, _ = rows.indices(shape[0])
            row = (end - begin) // shape[0]
            shape, begin, end = [high - low, *shape[1:]], begin + low * row, begin + high * row
        dtype = _DTYPES[stored["dtype"]]
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        if self._begin + end > os.fstat(self._file.fileno()).st_size:
            raise EOFError(f"it ends before {name} does")
        content = bytearray(end - begin)
        self._file.seek(self._begin + begin)
        if self._file.readinto(content) < len(content):
            raise EOFError(f"it ends within {name}")
        return torch.frombuffer(content, dtype=dtype).view(shape)


def _loaded(path: Path) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a file of torch, in the memory of its mapping."""
    if not is_zipfile(path):
        raise ModelRefused(f"{path.name} is not a whole file of torch.save, or it is of torch before 1.6: {_AGAIN}")
    found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(found, Mapping):
        raise ModelRefused(f"{path.name} holds an object of type {type(found).__name__}, not a state dict: {_AGAIN}")
    if odd := [name for name, value in found.items() if not isinstance(value, torch.Tensor)]:
        raise ModelRefused(
            f"{path.name} holds more than a state dict: {odd[0]!r} is of type {type(found[odd[0]]).__name__}, not a "
            f"tensor. Save model.state_dict() alone"
        )
    return found


def _form(path: Path, name: str, stored: Any) -> Form:
    if (dtype := _DTYPES.get(stored.get_dtype())) is None:
        raise ModelRefused(f"{name} in {path.name} has dtype {stored.get_dtype()}, which no parameter of torch has")
    return tuple(stored.get_shape()), dtype


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn errors in the context into `ModelRefused` of a file that cannot be read, except lack of memory."""
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
    """Return the reason why reading a file raises `error`."""
    text = str(error).strip()
    if text.startswith("Weights only load failed"):  # and goes on with how to load it all the same
        named = re.search(r"GLOBAL (\S+)", text)
        what = f"a {named[1]} in it" if named else "more than tensors in it, or is damaged"
        return f"has {what}; nothing but tensors is unpickled: {_AGAIN}"
    return f"cannot be read, so it may be damaged or cut off: {(text.splitlines() or [type(error).__name__])[0]}"


def files_by_name(path: Path) -> Mapping[str, Path]:
    """Return the file of each tensor, by the tensors' names.

    Args:
        path: A file, an index of files, or a folder with one of them.

    Raises:
        ModelRefused: There is no such file, or it is not a file of tensors.
    """
    file = _in_folder(path) if path.is_dir() else path
    if not file.exists():
        raise ModelRefused(f"there is no such file; {_WANTED}")
    if file.name.endswith(".index.json"):
        return _indexed(file)
    if file.suffix not in (*SAFETENSORS, *TORCH):
        raise ModelRefused(f"a {file.suffix or 'nameless'} file is not read; {_WANTED}")
    return dict.fromkeys(names_in(file), file)


def _in_folder(folder: Path) -> Path:
    for name in (INDEX, WHOLE):
        if (folder / name).exists():
            return folder / name
    raise ModelRefused(f"the folder holds neither {INDEX} nor {WHOLE}; save_pretrained() writes one of them")


def _indexed(index: Path) -> Mapping[str, Path]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        files = {str(name): str(file) for name, file in content["weight_map"].items()}
        copies = (content.get("metadata") or {}).get(COPIES, {})
        also = [(str(name), str(file)) for file, names in copies.items() for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelRefused(f"{index.name} is no index of safetensors files: {type(error).__name__}: {error}") from error
    for file in (*files.values(), *(file for _, file in also)):
        if Path(file).name != file or Path(file).suffix not in SAFETENSORS:
            raise ModelRefused(f"{index.name} names {file!r}; expected .safetensors files beside it")
    found = {name: index.parent / file for name, file in files.items()}
    for name, file in also:
        if name in found and not found[name].exists() and (index.parent / file).exists():
            found[name] = index.parent / file
    return found


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of rows of a stored tensor.

    Attributes:
        name: Name of the tensor in the file.
        rows: The rows.
        bytes: Size of the rows.
    """

    name: str
    rows: Rows
    bytes: int


def read_into(file: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors of `file` into `targets`, by the names in the file; shapes and dtypes must be the same.

    Raises:
        ModelRefused: The file cannot be read.
    """
    pieces = [piece for name, target in targets.items() for piece in pieces_of(name, target)]
    with torch.no_grad():
        for group in spans(pieces) if is_mapped(file) else [pieces]:
            with values_in(file) as values:
                for piece in group:
                    targets[piece.name][piece.rows].copy_(values(piece.name, piece.rows))


def pieces_of(name: str, target: torch.Tensor) -> Iterator[Piece]:
    """Yield all rows of `target`, in pieces of at most `PIECE` bytes, or of one row."""
    size = target.numel() * target.element_size()
    if not target.dim() or size <= PIECE:
        yield Piece(name, ..., size)
        return
    row = size // len(target)
    step = max(1, PIECE // row)
    for low in range(0, len(target), step):
        high = min(low + step, len(target))
        yield Piece(name, slice(low, high), (high - low) * row)


def spans(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces in order, in spans of at most `SPAN` bytes, or of one piece."""
    span: list[Piece] = []
    size = 0
    for piece in pieces:
        if span and size + piece.bytes > SPAN:
            yield span
            span, size = [], 0
        span.append(piece)
        size += piece.bytes
    if span:
        yield span


def sources(wanted: Collection[str], stored: Collection[str], twins: Twins) -> dict[str, str]:
    """Return the names under which entries are stored, by the names that a stage wants.

    Of the names of one parameter the last stored one counts: a state dict that has all is loaded in that order.

    Args:
        wanted: Names that the stage wants.
        stored: Names that are stored.
        twins: For each name of a parameter with several names, all its names.
    """
    candidates = {name: [each for each in twins.get(name, (name,)) if each in stored] for name in wanted}
    return {name: found[-1] for name, found in candidates.items() if found}


def misnamed(wanted: Collection[str], stored: Collection[str], twins: Twins, known: Collection[str]) -> Iterator[str]:
    """Yield a text for each wanted name that is not stored, and each stored name that the model does not know.

    Args:
        wanted: Names that the stage wants.
        stored: Names in the files.
        twins: For each name of a parameter with several names, all its names.
        known: Names of the entries of all stages.
    """
    located = sources(wanted, stored, twins)
    absent = [name for name in wanted if name not in located]
    strange = [name for name in stored if name not in known]
    for number, name in enumerate(absent):
        yield f"{name} is missing{_hint(name, strange, number)}"
    for number, name in enumerate(strange, len(absent)):
        yield f"{name} is not the model's{_hint(name, absent, number)}"


def misformed(wanted: Mapping[str, torch.Tensor], forms: Mapping[str, Form]) -> Iterator[str]:
    """Yield a text for each wanted tensor whose shape or dtype differs from its entry of `forms`."""
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
    """Return the first faults as text, and how many more there are."""
    more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return "; ".join(faults[:SHOWN]) + more


def _hint(name: str, names: Collection[str], number: int) -> str:
    """Return a hint for a fault that is shown, else "": hints for all faults would take long."""
    return hint(name, names) if number < SHOWN else ""
