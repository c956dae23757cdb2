"""Header of a prefix cache: the plan keys that its rows were computed from, and the form of its files.

cache.json    {"header": {...}, "sha256": of the header's bytes}
"""

from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from stageline.pipeline.plan import Plan
from stageline.pipeline.plan.difference import counted
from stageline.workers.disk.atomic_file import write_file

FORMAT = "prefix-cache/1"
NAME = "cache.json"

_KEYS = ("model.factory", "model.options", "model.weights", "model.autocast", "data", "run.seed")
_SIZES = ("schedule.microbatches", "schedule.accumulate")
_OF_CUTS = ("queues.codec.", "model.cut.", "model.stages.")
_OTHER = ("data.num_workers", "data.held_out", "data.check")  # of them: what changes no row


class CachedLeaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Form of one tensor that is kept: its dtype as torch prints it without `torch.`, and the shape of one row."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "CachedLeaf":
        """Return the form of a microbatch's tensor, whose dimension 0 is rows."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))

    @property
    def type(self) -> torch.dtype:
        """The dtype, as torch's object. Raises `ValueError` if torch has none of that name."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"torch has no dtype {self.dtype!r}")
        return found

    @property
    def bytes(self) -> int:
        """Number of bytes of a row."""
        return self.type.itemsize * torch.Size(self.shape).numel()

    def __str__(self) -> str:
        """Return dtype and shape, for people: "float32 [rows, 768]"."""
        return f"{self.dtype} [rows{''.join(f', {size}' for size in self.shape)}]"


class CacheHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Header of a cache.

    `parts` are the plan's keys that its rows follow from; `samples` is the number of rows that its files have room for;
    `structure` is that of a message's payload, whose tensors are `leaves`.
    """

    format: str = FORMAT
    parts: dict[str, Any]
    samples: int
    structure: Any
    leaves: tuple[CachedLeaf, ...]

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a sample's rows in all files."""
        return sum(leaf.bytes for leaf in self.leaves)


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    header: msgspec.Raw
    sha256: str


def parts_of(plan: Plan, first_layer: int) -> dict[str, Any]:
    """Return the plan's keys that the rows follow from, and the layer before which the rows are taken.

    With lossy codecs the cut is one of these keys: a codec loses something wherever the model is cut.
    """
    found = counted(plan.as_mapping())
    of_cuts = _OF_CUTS if plan.queues.lossy else ()
    wanted = {key: value for key, value in found.items() if _is_part(key) or f"{key}.".startswith(of_cuts)}
    return msgspec.to_builtins({**wanted, "layers before": first_layer})  # type: ignore[no-any-return]


def write_header(folder: Path, header: CacheHeader) -> None:
    """Write the header into `folder`; on return it is on the disk. Raises `OSError`."""
    data = msgspec.json.encode(header)
    sealed = _Sealed(msgspec.Raw(data), sha256(data).hexdigest())
    write_file(folder / NAME, msgspec.json.encode(sealed) + b"\n")


def read_header(folder: Path) -> CacheHeader:
    """Return the header in `folder`. Raises `OSError` if it cannot be read, `ValueError` if it is damaged."""
    try:
        sealed = msgspec.json.decode((folder / NAME).read_bytes(), type=_Sealed)
        if sha256(sealed.header).hexdigest() != sealed.sha256:
            raise ValueError("its SHA-256 does not match")
        return msgspec.json.decode(sealed.header, type=CacheHeader)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{NAME} is damaged: {error}") from error


def difference(header: CacheHeader, parts: dict[str, Any], samples: int) -> str:
    """Return why the rows of another cache are not those of this run; "" if they are.

    Args:
        header: Header of the other cache.
        parts: Keys of the plan that the rows of this run follow from.
        samples: Number of samples of this run.
    """
    if header.format != FORMAT:
        return f"it is of format {header.format!r}, this stageline reads {FORMAT!r}"
    for key in sorted(header.parts.keys() | parts.keys()):
        if (there := header.parts.get(key)) != (here := parts.get(key)):
            return f"it is of another model or dataset: {key} is {there!r} there, {here!r} here"
    if header.samples != samples:
        return f"it is of another dataset: of {header.samples} samples there, {samples} here"
    return ""


def _is_part(key: str) -> bool:
    return key in _SIZES or (key not in _OTHER and any(f"{key}.".startswith(f"{each}.") for each in _KEYS))
