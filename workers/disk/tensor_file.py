"""Tensors on disk: a safetensors file, with a note on each tensor that the format would not give back just as it was.

The format keeps dtypes, shapes and values of row-major tensors. Bits of later steps follow strides and alignment too,
so the notes, JSON in the file's metadata, hold those. Complex numbers are stored as pairs of real ones.

Values around tensors, such as an optimizer's state, become JSON beside the file (`encode_state`):

    {"betas": (0.9, inf), "state": {0: {"step": <tensor>}}}
    {"betas": {"$tuple": [0.9, {"$float": "inf"}]},
     "state": {"$dict": [[0, {"step": {"$tensor": "optimizer.state.0.step"}}]]}}      <tensor> has that name

Decoded values are equal in value and type. Nothing is evaluated, and no class is looked up by a name in the data. The
structure of messages is another one: it has no dict keys but strings, and is not meant to be read by people.
"""

import math
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stageline.pipeline.retry import lacks_memory
from stageline.pipeline.stage.layers.memory import ALIGNMENT, empty, layout, packed_strides, skew_of

from .atomic_file import draft_of, make_folder, publish, sync

Make = Callable[..., torch.Tensor]

_NUMBER = re.compile(r"(?<=\(os error )\d+(?=\))|(?<=\()\d+(?=\)$)")  # of the system, in what safetensors and torch say
_METADATA = "stageline"  # the key of the notes
_COMPLEX = (torch.float16, torch.float32, torch.float64)  # of which pairs are complex numbers
_MOST = 2**47  # bytes that a process can address


class Unsaveable(Exception):
    """Error: a value cannot be stored; the text says where it lies and what it is."""


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Layout of a tensor before it was stored.

    Attributes:
        strides: Strides in elements; None if row-major.
        skew: Bytes off an aligned address.
        complex: True if complex numbers are stored as pairs of real ones.
    """

    strides: tuple[int, ...] | None = None
    skew: int = 0
    complex: bool = False


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write CPU tensors to a new file; once this returns, it is on the disk and was read back from there.

    Raises `OSError`, also if the file does not read back as it was written, and `Unsaveable` for a tensor that the
    format cannot hold (sparse, quantized).
    """
    stored, notes = _content(tensors)
    try:
        save_file(stored, path, {_METADATA: msgspec.json.encode(notes).decode()} if notes else None)
    except SafetensorError as error:
        raise _system_error(error) from error
    except (ValueError, KeyError, RuntimeError) as error:
        raise Unsaveable(f"{path.name}: {error}") from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # save_file keeps it from all other users
    sync(path)
    _drop_cache(path)
    with _opened(path) as file:
        for name, tensor in stored.items():
            if not torch.equal(_bytes(file.get_tensor(name)), _bytes(tensor)):
                raise OSError(f"{name}, read back from {path}, differs from what was written: check this disk")


def publish_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write CPU tensors to the file `path`, whole or not at all; it replaces an older one.

    Makes the file's folder if needed. Once this returns, the file survives a power failure. Raises as `write_tensors`.
    """
    make_folder(path.parent)
    draft = draft_of(path)
    try:
        write_tensors(draft, tensors)
        publish(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def link_tensors(path: Path, former: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Give the file `former` the second name `path` if it holds exactly these CPU tensors, as they lie.

    Args:
        path: New name.
        former: File that may hold the tensors; it is read from the disk first.
        tensors: Tensors by name.

    Returns:
        True if linked. False, and nothing has changed, if `former` holds others or cannot be used.

    Raises:
        Unsaveable: The format cannot hold a tensor.
    """
    stored, notes = _content(tensors)
    try:
        _drop_cache(former)
        if not _has(former, stored, notes):
            return False
        os.link(former, path)
    except (OSError, ValueError, RuntimeError, SafetensorError):  # it is damaged, or the system has no such names
        return False
    return True


def read_tensors(
    path: Path, names: Collection[str] | None = None, *, packed: bool = False, make: Make = empty
) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, in memory of their own.

    Args:
        path: Path of the file.
        names: Names of the wanted tensors; None for all.
        packed: Row-major tensors, whatever layout is noted; otherwise as they lay when written.
        make: Makes the memory, with the arguments of `empty`.

    Raises:
        OSError, ValueError, MemoryError: The file cannot be read, is damaged, or memory is short.
    """
    try:
        with _opened(path) as file:
            notes = _notes(file)
            wanted = [name for name in file.keys() if names is None or name in names]  # noqa: SIM118  # no mapping
            return {
                name: _restored(name, file.get_tensor(name), notes.get(name, Note()), packed, make) for name in wanted
            }
    except (SafetensorError, RuntimeError) as error:
        if lacks_memory(error):
            raise MemoryError(str(error)) from error
        raise ValueError(str(error)) from error


def forms_in(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of a file, without reading their values. Raises `OSError`, `ValueError`."""
    try:
        with _opened(path) as file:
            notes = _notes(file)
            return {name: _form(file, name, notes.get(name, Note())) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(str(error)) from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    path.open("rb").close()  # safetensors takes any error for a missing file
    try:
        with safe_open(path, "pt") as file:
            yield file
    except RuntimeError as error:  # torch opens the file a second time
        raise (_system_error(error) if _NUMBER.search(str(error)) else error) from error.__cause__


def _notes(file: Any) -> dict[str, Note]:
    return msgspec.json.decode((file.metadata() or {}).get(_METADATA, "{}"), type=dict[str, Note])


def _form(file: Any, name: str, note: Note) -> tuple[torch.dtype, tuple[int, ...]]:
    stored = file.get_slice(name)
    shape = tuple(stored.get_shape())
    dtype = (stored[:0] if shape else file.get_tensor(name)).dtype
    return (dtype.to_complex(), shape[:-1]) if note.complex else (dtype, shape)


def _system_error(error: Exception) -> OSError:
    """Return `error` as an `OSError`, with the system's error number if the text has one."""
    number = _NUMBER.search(str(error))
    return OSError(int(number[0]), os.strerror(int(number[0]))) if number else OSError(str(error))


def _drop_cache(path: Path) -> None:
    """Make the next read come from the disk and not from the page cache, where the system can."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _content(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Note]]:
    """Return the tensors in their stored form, and the notes on those whose layout the format would lose."""
    stored = _unshared({name: _stored(name, tensor) for name, tensor in tensors.items()})
    return stored, {name: note for name, tensor in tensors.items() if (note := _note(tensor)) != Note()}


def _has(path: Path, stored: Mapping[str, torch.Tensor], notes: Mapping[str, Note]) -> bool:
    with _opened(path) as file:
        if {*file.keys()} != stored.keys() or _notes(file) != notes:
            return False
        return all(_same(file.get_tensor(name), tensor) for name, tensor in stored.items())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(_bytes(one), _bytes(other))


def _stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise Unsaveable(f"{name} is a tensor of layout {tensor.layout} and type {tensor.dtype}")
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.contiguous()


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors without shared memory, which the format refuses.

    The first of several in one memory keeps it; the others are copied.
    """
    owners = {tensor.untyped_storage().data_ptr(): name for name, tensor in reversed(tensors.items())}
    return {
        name: tensor if owners[tensor.untyped_storage().data_ptr()] == name else tensor.clone()
        for name, tensor in tensors.items()
    }


def _note(tensor: torch.Tensor) -> Note:
    shape, strides = tuple(tensor.shape), tensor.stride()
    unusual = strides != _row_major(shape) and 0 not in strides and layout(shape, strides).extent is not None
    return Note(strides if unusual else None, skew_of(tensor), tensor.is_complex())


def _restored(name: str, stored: torch.Tensor, note: Note, packed: bool, make: Make) -> torch.Tensor:
    """Return the tensor with the layout in `note` or, if `packed`, row-major.

    Raises `ValueError`, which names the tensor, for a layout that `stored` cannot have had.
    """
    if wrong := _fault(tuple(stored.shape), stored.dtype, note):
        raise ValueError(f"{name} is damaged: {wrong}")
    tensor = torch.view_as_complex(stored) if note.complex else stored
    shape = tuple(tensor.shape)
    strides, skew = (None, 0) if packed else (note.strides, note.skew)
    return make(shape, strides or _row_major(shape), tensor.dtype, skew).copy_(tensor)


def _fault(shape: tuple[int, ...], dtype: torch.dtype, note: Note) -> str:
    """Return why the note cannot be true of a tensor stored in this form; "" if it can.

    A layout may have gaps, so it may take more memory than is stored.
    """
    if note.complex:
        if dtype not in _COMPLEX or shape[-1:] != (2,):
            return f"noted are complex numbers, stored is {dtype} of shape {list(shape)}"
        dtype, shape = dtype.to_complex(), shape[:-1]
    if not 0 <= note.skew < ALIGNMENT or note.skew % dtype.itemsize:
        return f"a skew of {note.skew} bytes cannot be: it is below {ALIGNMENT} and a multiple of {dtype.itemsize}"
    if note.strides is None:
        return ""
    if len(note.strides) != len(shape) or min(note.strides, default=1) < 1:
        return f"strides {list(note.strides)} cannot be of shape {list(shape)}"
    extent = layout(shape, note.strides).extent
    if extent is None:
        return f"with strides {list(note.strides)}, numbers of shape {list(shape)} would lie in one place"
    return "" if extent * dtype.itemsize < _MOST else f"strides {list(note.strides)} need more memory than there can be"


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return packed_strides(shape, tuple(range(len(shape), 0, -1)))  # the last dimension is the innermost


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


Json = Any  # None, bool, int, float, str, and lists and dicts of them

_DICTS = (dict, OrderedDict)
_WHOLE = re.compile(r"-?\d+")
_EXACT = 2**53  # whole numbers up to here are the same in every reader of JSON


class BadStateTree(Exception):
    """Error: the JSON is not a result of `encode_state`, or its tensors are missing."""


def encode_state(value: Any, path: str, tensors: dict[str, Tensor]) -> Json:
    """Return `value` as JSON, and add its tensors to `tensors`.

    Args:
        value: Tree of tensors, None, bool, int, float, str, and dicts, Counters, lists and tuples.
        path: Beginning of the tensors' names, which are their paths in `value`.
        tensors: Gets the tensors by name.

    Raises:
        Unsaveable: `value` has anything else.
    """
    match value:
        case None | bool() | str() if type(value) in (type(None), bool, str):
            return value
        case Tensor():
            return {"$tensor": _named(value, path, tensors)}
        case int() if type(value) is int:
            return value if abs(value) <= _EXACT else {"$int": str(value)}
        case float() if type(value) is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        case list() if type(value) is list:
            return _items(value, path, tensors)
        case tuple() if type(value) is tuple:
            return {"$tuple": _items(value, path, tensors)}
        case dict() if type(value) in _DICTS and all(map(_is_plain, value)):
            return {key: encode_state(each, f"{path}.{key}", tensors) for key, each in value.items()}
        case dict() if isinstance(value, Counter) or type(value) in _DICTS:
            pairs = [
                [encode_state(key, f"{path} (a key)", tensors), encode_state(each, f"{path}.{key}", tensors)]
                for key, each in value.items()
            ]
            return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
        case _:
            raise Unsaveable(f"{path} is of type {type(value).__module__}.{type(value).__qualname__}")


def decode_state(encoded: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `encode_state` has encoded. Raises `BadStateTree`."""
    match encoded:
        case list():
            return [decode_state(each, tensors) for each in encoded]
        case dict() if all(map(_is_plain, encoded)):
            return {key: decode_state(each, tensors) for key, each in encoded.items()}
        case dict():
            return _tagged(encoded, tensors)
        case _:  # JSON has no others: None, bool, int, float and str
            return encoded


def _tagged(encoded: dict[str, Json], tensors: Mapping[str, Tensor]) -> Any:
    match list(encoded.items()):
        case [("$tensor", str(name))] if name in tensors:
            return tensors[name]
        case [("$int", str(digits))] if _WHOLE.fullmatch(digits):
            return int(digits)
        case [("$float", "inf" | "-inf" | "nan" as name)]:
            return float(name)
        case [("$tuple", list(items))]:
            return tuple(decode_state(each, tensors) for each in items)
        case [("$dict" | "$counter" as tag, list(pairs))]:
            try:
                value = {decode_state(key, tensors): decode_state(each, tensors) for key, each in pairs}
            except (TypeError, ValueError) as error:
                raise _meaningless(pairs) from error
            return Counter(value) if tag == "$counter" else value
        case _:
            raise _meaningless(encoded)


def _named(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    while path in tensors:  # the keys 1 and "1" of one dict give the same path
        path += "'"
    tensors[path] = tensor
    return path


def _items(values: list[Any] | tuple[Any, ...], path: str, tensors: dict[str, Tensor]) -> list[Json]:
    return [encode_state(each, f"{path}.{place}", tensors) for place, each in enumerate(values)]


def _is_plain(key: object) -> bool:
    """Return True if `key` can be a JSON object's key, and is not mistaken for a tag."""
    return isinstance(key, str) and not key.startswith("$")


def _meaningless(encoded: Json) -> BadStateTree:
    return BadStateTree(f"{str(encoded)[:200]} is no encoded value")
