"""Tensors in slices, as each process of a torch.distributed.checkpoint writes those that it has.

shard-1   saved_offsets [0, 0]   | a b |      the shape of a slice is that of the file's tensor
shard-2   saved_offsets [1, 0]   | c d |

The slices must tile the tensor: none lies over another, and together they have as many numbers as it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from .stored_weights import Form, StoredWeights, WeightsUnusable, same_bits

Ints = tuple[int, ...]
_SLICES = "DCP_SHARDING_INFO"  # in a file's metadata: {name: {"saved_offsets": [...]}}


class _Begin(msgspec.Struct, frozen=True):
    saved_offsets: list[Annotated[int, msgspec.Meta(ge=0, le=2**62)]]


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a tensor: where it begins in each dimension, its shape and dtype, and the files that have it."""

    offsets: Ints
    shape: Ints
    dtype: torch.dtype
    files: tuple[Path, ...]

    @property
    def ends(self) -> Ints:
        return tuple(map(sum, zip(self.offsets, self.shape, strict=True)))


class SlicedWeights(StoredWeights):
    """Of the shards that the processes have written, all of them."""

    @cached_property
    def forms(self) -> Mapping[str, Form]:
        return {name: self._form(name, slices) for name, slices in self._slices.items()}

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        return {name: self._assembled(name) for name in names}

    def _form(self, name: str, slices: Sequence[Slice]) -> Form:
        """Of the tensor that `slices` tile. Raises `WeightsUnusable` if they do not."""
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
    """Two of the slices of a tensor that have a place in common, if there are any."""
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
    """Where the tensors of a file begin, if they are slices. Raises `WeightsUnusable`."""
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
