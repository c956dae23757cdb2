"""Weights that other programs have written, in files that are read without executing anything.

x.safetensors                          that file
x.pt, x.pth                            a state dict of torch.save; nothing but tensors is unpickled (weights_only)
model.safetensors.index.json           the files that it names, beside it
a folder with one of them              as from transformers, or from HuggingFaceStorageWriter
a folder with *.safetensors            all of them: stages, or shards of torch.distributed.checkpoint, each with slices
a folder with .metadata                refused: the metadata of torch.distributed.checkpoint is a pickle

Each process of a torch.distributed.checkpoint writes the slices of a tensor that it has. They must tile the tensor: no
two overlap, and together they have as many numbers as it:

shard-1   saved_offsets [0, 0]   | a b |      the shape of a slice is that of the file's tensor
shard-2   saved_offsets [1, 0]   | c d |

For a plan, such weights are cut for its stages, so that each machine needs its own stages' files alone:

/data/gpt2/model.safetensors  ->  parts/stage-0.safetensors, parts/stage-1.safetensors, an index of them
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model import tensor_files
from stageline.pipeline.model.cut import build_segments
from stageline.pipeline.model.segment import Segment
from stageline.pipeline.model.tensor_files import INDEX, TORCH, WHOLE, files_by_name
from stageline.pipeline.plan import Plan

from .export import export_file, export_folder, write_index, write_tensors
from .stored_weights import Form, StoredWeights, WeightsUnusable, same_bits

Ints = tuple[int, ...]
_SLICES = "DCP_SHARDING_INFO"  # in a file's metadata: {name: {"saved_offsets": [...]}}
_PICKLE = ".metadata"
_MERGED = ".merged.safetensors"


class _Begin(msgspec.Struct, frozen=True):
    saved_offsets: list[Annotated[int, msgspec.Meta(ge=0, le=2**62)]]


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a tensor: its first index in each dimension, its shape and dtype, and the files that have it."""

    offsets: Ints
    shape: Ints
    dtype: torch.dtype
    files: tuple[Path, ...]

    @property
    def ends(self) -> Ints:
        """Index after the last in each dimension."""
        return tuple(map(sum, zip(self.offsets, self.shape, strict=True)))


class SlicedWeights(StoredWeights):
    """Weights in the shards that the processes of a checkpoint have written, all of them."""

    @cached_property
    def forms(self) -> Mapping[str, Form]:
        """Dtype and shape of each whole tensor. Raises `WeightsUnusable` if slices do not tile a tensor."""
        return {name: self._form(name, slices) for name, slices in self._slices.items()}

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the tensors `names`, put together from their slices.

        Raises:
            WeightsUnusable: A file cannot be read, or files with the same slice differ.
        """
        return {name: self._assembled(name) for name in names}

    def _form(self, name: str, slices: Sequence[Slice]) -> Form:
        """Return the form of the tensor that `slices` tile. Raises `WeightsUnusable` if they do not."""
        first, *others = slices
        for each in others:
            if (each.dtype, len(each.shape)) != (first.dtype, len(first.shape)):
                raise WeightsUnusable(
                    f"{name} is {first.dtype} of shape {list(first.shape)} in {first.files[0]}, and {each.dtype} of "
                    f"shape {list(each.shape)} in {each.files[0]}: these are no slices of one tensor"
                )
        if both := overlapping(slices):
            one, other = both
            raise WeightsUnusable(
                f"{name} has two slices for one place: that at {list(one.offsets)} in {one.files[0]} and that at "
                f"{list(other.offsets)} in {other.files[0]}. Remove the file that is not of this checkpoint"
            )
        shape = tuple(map(max, zip(*(each.ends for each in slices), strict=True)))
        if sum(prod(each.shape) for each in slices) != prod(shape):
            raise WeightsUnusable(f"{self.title} have not all of {name}: a shard is missing beside {first.files[0]}")
        return first.dtype, shape

    @cached_property
    def _slices(self) -> Mapping[str, Sequence[Slice]]:
        found: dict[str, dict[tuple[Ints, Ints, torch.dtype], list[Path]]] = {}
        for file in self.files:
            places = slices_in(file) or {}
            for name, (dtype, shape) in self._forms[file].items():
                key = _offsets(file, name, places, shape), shape, dtype
                found.setdefault(name, {}).setdefault(key, []).append(file)
        return {name: [Slice(*key, tuple(files)) for key, files in each.items()] for name, each in found.items()}

    def _assembled(self, name: str) -> torch.Tensor:
        dtype, shape = self.forms[name]
        whole = torch.empty(shape, dtype=dtype)
        for part in self._slices[name]:
            there = whole[tuple(slice(low, high) for low, high in zip(part.offsets, part.ends, strict=True))]
            first, *others = part.files
            there.copy_(_read(first, name))
            for file in others:
                if not same_bits(_read(file, name), there):
                    raise WeightsUnusable(
                        f"{name} has other numbers at {list(part.offsets)} in {file} than in {first}: remove the file "
                        "that is not of this checkpoint"
                    )
        return whole


def overlapping(slices: Sequence[Slice]) -> tuple[Slice, Slice] | None:
    """Return two slices of a tensor that have a place in common; None if there are none."""
    near: list[Slice] = []  # those that have not ended, in dimension 0, where the next begins
    for each in sorted(slices, key=lambda part: part.offsets):
        near = [other for other in near if other.ends[0] > each.offsets[0]]
        for other in near:
            lows, highs = zip(each.offsets, other.offsets, strict=True), zip(each.ends, other.ends, strict=True)
            if all(max(low) < min(high) for low, high in zip(lows, highs, strict=True)):
                return other, each
        near.append(each)
    return None


def slices_in(file: Path) -> Mapping[str, _Begin] | None:
    """Return where the tensors of a file begin, by name; None if the file has whole tensors.

    Raises:
        WeightsUnusable: The file cannot be read, or its metadata are damaged.
    """
    with _opened(file) as opened:
        text = (opened.metadata() or {}).get(_SLICES)
    try:
        return None if text is None else msgspec.json.decode(text, type=dict[str, _Begin])
    except (ValueError, RecursionError) as error:  # msgspec's errors are such
        raise WeightsUnusable(f"{file} does not tell which slices it has: {error}") from error


def _offsets(file: Path, name: str, places: Mapping[str, _Begin], shape: Ints) -> Ints:
    if name not in places:
        raise WeightsUnusable(f"{file} does not tell which slice of {name} it has")
    offsets = tuple(places[name].saved_offsets)
    if len(offsets) != len(shape):
        raise WeightsUnusable(f"{file} has a slice of {name} that begins at {list(offsets)}, of shape {list(shape)}")
    return offsets


def _read(file: Path, name: str) -> torch.Tensor:
    with _opened(file) as opened:
        return opened.get_tensor(name)  # type: ignore[no-any-return]


def _opened(file: Path) -> Any:
    try:
        file.open("rb").close()  # safetensors takes any error for a missing file
        return safe_open(file, "pt")
    except (OSError, SafetensorError, RuntimeError) as error:
        raise WeightsUnusable(f"{file} cannot be read: {error}") from error


def foreign_weights(path: Path) -> StoredWeights:
    """Return the weights at `path`, a file or a folder.

    Raises:
        WeightsUnusable: There are no weights, or files have different tensors of one name.
    """
    if not path.exists():
        raise WeightsUnusable(f"{path} does not exist: name a file or folder of weights")
    if path.suffix in TORCH and not path.is_dir():
        return TorchWeights(f"the weights in {path}", (path,))
    files = _files_in(path) if path.is_dir() else _files_of(path)
    sliced = any(slices_in(file) is not None for file in files)
    found = SlicedWeights(f"the weights in {path}", files) if sliced else StoredWeights(f"the weights in {path}", files)
    if not sliced and len(files) > 1:
        _demand_equal(found)
    return found


def is_readable_by_stages(path: Path) -> bool:
    """Return True if `model.weights` may name `path` as it is."""
    return not path.is_dir() or any((path / name).exists() for name in (INDEX, WHOLE))


class TorchWeights(StoredWeights):
    """Weights in a file of `torch.save`."""

    @cached_property
    def places(self) -> Mapping[str, Path]:
        """File of each entry."""
        return dict.fromkeys(self.forms, self.files[0])

    @cached_property
    def forms(self) -> Mapping[str, Form]:
        """Dtype and shape of each entry. Raises `WeightsUnusable`."""
        with _refused():
            found = tensor_files.forms_in(self.files[0], set(tensor_files.names_in(self.files[0])))
            return {name: (dtype, shape) for name, (shape, dtype) in found.items()}

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return copies of the entries `names`, row-major. Raises `WeightsUnusable`."""
        with _refused(), tensor_files.values_in(self.files[0]) as values:
            return {name: values(name, ...).clone(memory_format=torch.contiguous_format) for name in names}


def _files_of(path: Path) -> tuple[Path, ...]:
    """Return the files of a path that `model.weights` may name. Raises `WeightsUnusable`."""
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
    """Return a context that turns `ModelRefused` into `WeightsUnusable`: the fault is in files, not in a plan."""
    try:
        yield
    except ModelRefused as refused:
        raise WeightsUnusable(str(refused)) from refused


def _demand_equal(weights: StoredWeights) -> None:
    """Raise `WeightsUnusable` if two files have different tensors of one name.

    The same tensor may be in several files: stages that share a parameter have a copy each.
    """
    for name in weights.places:
        first, *others = weights.files_with(name)
        for file in others:
            if not same_bits(weights.read_from(first, [name])[name], weights.read_from(file, [name])[name]):
                raise WeightsUnusable(f"{name} is in {first} and in {file}, and differs: remove one of the files")


def import_stages(weights: StoredWeights, source: Path, plan: Plan, target: Path) -> None:
    """Write the folder `target` with the weights, cut for the stages of `plan`.

    Entries have the model's names, or those that transformers has for the model. All are checked before anything is
    written. One stage is in memory at a time.

    Args:
        weights: Weights to import.
        source: Path that they come from.
        plan: Plan whose stages will read them.
        target: Folder, which must not exist.

    Raises:
        ModelRefused: The model cannot be made, or has other weights.
        PlanRefused: The model has another number of stages than the plan says.
        WeightsUnusable: The folder exists, or the weights cannot be read.
        OSError: The folder cannot be written.
    """

    def write(draft: Path) -> None:
        merged = draft / _MERGED
        if not is_readable_by_stages(source):
            export_file(weights, merged)
        segments = build_segments(_reading(plan, merged if merged.exists() else source))
        plan.resolved(len(segments))
        for part in segments:
            part.check()
        sizes: dict[str, int] = {}
        shards = {_file_of(part): _write(draft, part, sizes) for part in segments}
        write_index(draft, shards, sum(sizes.values()))
        merged.unlink(missing_ok=True)

    export_folder(target, write)


def _reading(plan: Plan, source: Path) -> Plan:
    """Return the plan with all stages reading `source`."""
    workers = tuple(each.model_copy(update={"weights": None}) for each in plan.workers)
    model = plan.model.model_copy(update={"weights": source.absolute()})
    return plan.model_copy(update={"model": model, "workers": workers})


def _write(folder: Path, part: Segment, sizes: dict[str, int]) -> list[str]:
    """Write a stage's file, and add the bytes of its entries to `sizes`. Return the names of the entries."""
    part.load()
    made: dict[int, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in part.weights.items():
        shared = tensor.data_ptr() in made  # by another name of the same parameter
        tensors[name] = tensor.clone() if shared else tensor.contiguous()
        made[tensor.data_ptr()] = tensor
    write_tensors(folder / _file_of(part), tensors)
    sizes |= {name: tensor.nbytes for name, tensor in tensors.items()}
    torch.nn.ModuleList(part.layers).to("meta")  # makes room for the next
    return list(tensors)


def _file_of(part: Segment) -> str:
    return f"stage-{part.index}.safetensors"
