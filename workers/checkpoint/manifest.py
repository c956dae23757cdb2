"""A snapshot's manifest: a JSON file with everything that is not a tensor, and the checksum of every other file.

It carries a checksum of its own, so that a flipped digit in a learning rate is found.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stageline.pipeline.errors import StagelineError
from stageline.workers.disk.atomic_file import sync

from .state_tree import Json

FORMAT = "snapshot/2"
MANIFEST = "manifest.json"

_UNSEALED = "0" * 64  # in place of the seal while that is computed


class SnapshotDamaged(StagelineError):
    """A snapshot is not what was written, or is of another run; `problems` lists what is wrong with it."""

    def __init__(self, folder: Path, problems: list[str]) -> None:
        found = "; ".join(problems)
        super().__init__(f"the snapshot {folder} cannot be used: {found}")
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a snapshot comes from: the run's id, and `Plan.digest()`. Another run's snapshots are refused."""

    run: str
    plan: str


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's size in bytes and SHA-256 in hex."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`written` is in seconds since the epoch, `torch` is its version. `training` is the state without the weights and
    without tensors. `sha256` is of the manifest with zeros in its place.
    """

    format: str = FORMAT
    sha256: str = _UNSEALED
    run: str
    plan: str
    stage: int
    step: int
    incarnation: int
    written: float
    torch: str
    files: dict[str, FileRecord]
    losses: dict[int, float | None]
    training: dict[str, Json]

    def same_state(self, other: "Manifest") -> bool:
        """Whether both snapshots hold the same bits, whichever worker wrote them."""
        return all(getattr(self, name) == getattr(other, name) for name in ("files", "losses", "training"))


class _Format(msgspec.Struct, frozen=True):
    format: str


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes and seals the manifest; when this returns, it is on the disk. Raises `OSError`."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    path = folder / MANIFEST
    path.write_bytes(data.replace(_UNSEALED.encode(), _seal(data), 1))
    sync(path)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the snapshot in `folder`. Raises `SnapshotDamaged`."""
    try:
        data = (folder / MANIFEST).read_bytes()
        _require_format(folder, data)
        manifest = msgspec.json.decode(data, type=Manifest)
    except FileNotFoundError as error:
        raise SnapshotDamaged(folder, [f"{MANIFEST} is missing"]) from error
    except OSError as error:
        raise SnapshotDamaged(folder, [str(error)]) from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are such, and so is text that is not UTF-8
        raise SnapshotDamaged(folder, [f"{MANIFEST} is damaged: {error}"]) from error
    seal = manifest.sha256.encode()
    if _seal(data.replace(seal, _UNSEALED.encode(), 1)) != seal:
        raise SnapshotDamaged(folder, [f"{MANIFEST} is damaged: its SHA-256 does not match"])
    return manifest


def file_record(path: Path) -> FileRecord:
    """The record of a file as it is now. Raises `OSError`."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
    return FileRecord(path.stat().st_size, digest.hexdigest())


def _seal(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _require_format(folder: Path, data: bytes) -> None:
    found = msgspec.json.decode(data, type=_Format).format
    if found != FORMAT:
        raise SnapshotDamaged(folder, [f"it is of format {found!r}, this stageline reads {FORMAT!r}"])
