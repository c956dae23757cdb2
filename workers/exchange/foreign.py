"""Weights that other programs have written, in files that are read without executing anything.

x.safetensors                          that file
x.pt, x.pth                            a state dict of torch.save; nothing but tensors is unpickled (weights_only)
model.safetensors.index.json           the files that it names, beside it
a folder with one of them              as from transformers, or from HuggingFaceStorageWriter
a folder with *.safetensors            all of them: stages, or shards of torch.distributed.checkpoint, each with slices
a folder with .metadata                refused: the metadata of torch.distributed.checkpoint is a pickle
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.weights import tensor_files
from stageline.pipeline.model.weights.tensor_files import TORCH
from stageline.pipeline.model.weights.weight_files import INDEX, WHOLE, files_by_name

from .stored_weights import Form, StoredWeights, WeightsUnusable

_PICKLE = ".metadata"
_SLICES = "DCP_SHARDING_INFO"  # in a file's metadata: {name: {"saved_offsets": [...]}}


def foreign_weights(path: Path) -> StoredWeights:
    """The weights at `path`. Raises `WeightsUnusable`."""
    if not path.exists():
        raise WeightsUnusable(f"{path} does not exist: name a file or folder of weights")
    if path.suffix in TORCH and not path.is_dir():
        return TorchWeights(f"the weights in {path}", (path,))
    files = _files_in(path) if path.is_dir() else _files_of(path)
    sliced = any(_slices_in(file) is not None for file in files)
    found = SlicedWeights(f"the weights in {path}", files) if sliced else StoredWeights(f"the weights in {path}", files)
    if not sliced and len(files) > 1:
        _require_single(found)
    return found


def is_readable_by_stages(path: Path) -> bool:
    """Whether `model.weights` may name `path` as it is."""
    return not path.is_dir() or any((path / name).exists() for name in (INDEX, WHOLE))


class TorchWeights(StoredWeights):
    """Of a file of `torch.save`."""

    @cached_property
    def places(self) -> Mapping[str, Path]:
        return dict.fromkeys(self.forms, self.files[0])

    @cached_property
    def forms(self) -> Mapping[str, Form]:
        with _refused():
            found = tensor_files.forms_in(self.files[0], set(tensor_files.names_in(self.files[0])))
            return {name: (dtype, shape) for name, (shape, dtype) in found.items()}

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        with _refused(), tensor_files.values_in(self.files[0]) as values:
            return {name: values(name, ...).clone(memory_format=torch.contiguous_format) for name in names}


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a tensor in a file: where it begins, in each dimension, and its shape."""

    file: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class SlicedWeights(StoredWeights):
    """Of the shards that each process of a torch.distributed.checkpoint has written: tensors in slices."""

    @cached_property
    def forms(self) -> Mapping[str, Form]:
        found: dict[str, Form] = {}
        for name, slices in self._slices.items():
            ends = [tuple(map(sum, zip(each.offsets, each.shape, strict=True))) for each in slices]
            shape = tuple(map(max, zip(*ends, strict=True)))
            if sum(torch.Size(each.shape).numel() for each in slices) != torch.Size(shape).numel():
                raise WeightsUnusable(
                    f"{self.title} have not all of {name}: a shard is missing beside {slices[0].file}"
                )
            found[name] = (self._forms[slices[0].file][name][0], shape)
        return found

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        return {name: self._assembled(name) for name in names}

    @cached_property
    def _slices(self) -> Mapping[str, list[Slice]]:
        found: dict[str, dict[tuple[int, ...], Slice]] = {}
        for file in self.files:
            offsets = _slices_in(file) or {}
            for name, (_, shape) in self._forms[file].items():
                begin = _offsets(file, name, offsets, shape)
                found.setdefault(name, {})[begin] = Slice(file, begin, shape)
        return {name: list(slices.values()) for name, slices in found.items()}

    def _assembled(self, name: str) -> torch.Tensor:
        dtype, shape = self.forms[name]
        whole = torch.empty(shape, dtype=dtype)
        for part in self._slices[name]:
            there = tuple(slice(low, low + size) for low, size in zip(part.offsets, part.shape, strict=True))
            with _opened(part.file) as file:
                whole[there].copy_(file.get_tensor(name))
        return whole


def _files_of(path: Path) -> tuple[Path, ...]:
    """Those of a path that `model.weights` may name. Raises `WeightsUnusable`."""
    with _refused():
        files = tuple(dict.fromkeys(files_by_name(path).values()))
    if lacking := [file.name for file in files if not file.exists()]:
        raise WeightsUnusable(f"{path} names {', '.join(lacking)}, not there")
    return files


def _files_in(folder: Path) -> tuple[Path, ...]:
    if any((folder / name).exists() for name in (INDEX, WHOLE)):
        return _files_of(folder)
    if found := sorted(folder.glob("*.safetensors")):
        return tuple(found)
    if (folder / _PICKLE).exists():
        raise WeightsUnusable(
            f"{folder} is a torch.distributed.checkpoint whose metadata ({_PICKLE}) is a pickle: reading it could "
            "execute anything, so it is not read. Save it in the safetensors form, with "
            "storage_writer=HuggingFaceStorageWriter(path=...), or, if you trust it, make it one file with `python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} model.pt`, and import that"
        )
    raise WeightsUnusable(f"{folder} has no weights: neither {INDEX} nor a .safetensors file")


@contextmanager
def _refused() -> Iterator[None]:
    """A context whose `ModelRefused` is that of files: no plan is concerned."""
    try:
        yield
    except ModelRefused as refused:
        raise WeightsUnusable(str(refused)) from refused


def _slices_in(file: Path) -> Mapping[str, Any] | None:
    """Where its tensors begin, if they are slices."""
    with _opened(file) as opened:
        text = (opened.metadata() or {}).get(_SLICES)
    try:
        return None if text is None else dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise WeightsUnusable(f"{file} does not tell which slices it has: {error}") from error


def _offsets(file: Path, name: str, found: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    try:
        offsets = tuple(int(each) for each in found[name]["saved_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsUnusable(f"{file} does not tell which slice of {name} it has") from error
    if len(offsets) != len(shape) or any(each < 0 for each in offsets):
        raise WeightsUnusable(f"{file} has a slice of {name} that begins at {list(offsets)}, of shape {list(shape)}")
    return offsets


def _opened(file: Path) -> Any:
    try:
        file.open("rb").close()  # safetensors takes any error for a missing file
        return safe_open(file, "pt")
    except (OSError, SafetensorError, RuntimeError) as error:
        raise WeightsUnusable(f"{file} cannot be read: {error}") from error


def _require_single(weights: StoredWeights) -> None:
    """Raises `WeightsUnusable` for a name that two files have."""
    for name in weights.places:
        first, *others = weights.files_with(name)
        if others:
            raise WeightsUnusable(f"{name} is in {first} and in {others[0]}: remove one of the files")
