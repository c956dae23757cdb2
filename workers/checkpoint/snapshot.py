"""Snapshot on disk: a folder of three files, or four.

weights.safetensors    the stage's part of the model's state_dict, under the unsplit model's names
averages.safetensors   where weights are averaged, after the first update: the averages of the trained parameters
training.safetensors   the other tensors: optimizer state, and what the forwards of microbatches in flight have read
manifest.json          everything that is not a tensor, and the size and SHA-256 of the other files. It carries a
                       checksum of its own, so that a flipped digit in a learning rate is found.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any

import msgspec
import torch

from stageline.broker.control.records import EvaluationRecord
from stageline.broker.control.store import Fact
from stageline.broker.ledger.evaluations import fact_of, record_of
from stageline.pipeline.errors import StagelineError
from stageline.pipeline.features.versions import InFlight, Previous
from stageline.pipeline.retry import passing_fault
from stageline.pipeline.stage.layers.memory import empty
from stageline.pipeline.stage.stage_state import StageState
from stageline.workers.disk.atomic_file import sync
from stageline.workers.disk.tensor_file import (
    BadStateTree,
    Json,
    Make,
    decode_state,
    encode_state,
    link_tensors,
    read_tensors,
    write_tensors,
)
from stageline.workers.runtime.calls import Position

FORMAT = "snapshot/5"
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
AVERAGES = "averages.safetensors"
TRAINING = "training.safetensors"
FILES = (WEIGHTS, TRAINING)  # of every snapshot
KNOWN = {*FILES, AVERAGES}

UNSEALED = "0" * 64  # in place of the seal while that is computed


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of one stage after `step` steps, taken by its worker under `incarnation`.

    Attributes:
        losses: On the last stage, losses before `step` that the run still has to report, by step; None for a step
            without rows. All of them and not only the latest, since older snapshots are deleted.
        rounds: On the last stage, all rounds of evaluation before `step`.
        calls: Number of the script's calls before, 0 in a run without one.
        evaluations: Number of batches evaluated before.
    """

    stage: int
    step: int
    incarnation: int
    state: StageState
    losses: Mapping[int, float | None] = field(default_factory=dict)
    calls: int = 0
    evaluations: int = 0
    rounds: Sequence[EvaluationRecord] = ()

    @property
    def position(self) -> Position:
        """Position of the run at this snapshot."""
        return Position.of_checkpoint(self.step, self.calls, self.evaluations)


class SnapshotDamaged(StagelineError):
    """Error that a snapshot is not as it was written, or is of another run.

    Mend: Resume the run as a whole: all stages begin at an older checkpoint then. `stageline checkpoint verify` lists
    the damages.

    Example: the snapshot runs/a/checkpoints/stage-1/40 cannot be used: weights.safetensors is damaged: its SHA-256 is
    another than was written
    """

    error_code = "SL403"

    def __init__(self, folder: Path, problems: list[str]) -> None:
        """Describe the snapshot in `folder` and its `problems`."""
        super().__init__(f"the snapshot {folder} cannot be used: {'; '.join(problems)}")
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a snapshot: the run's id, and `Plan.digest()`. Another run's snapshots are refused."""

    run: str
    plan: str


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size of a file in bytes, and its SHA-256 in hex."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of `manifest.json`.

    Attributes:
        sha256: Checksum of the manifest with zeros in this place.
        calls, evaluations: As in `Snapshot`.
        written: Seconds since the epoch.
        torch: Version of torch.
        training: State without weights and tensors.
    """

    format: str = FORMAT
    sha256: str = UNSEALED
    run: str
    plan: str
    stage: int
    step: int
    calls: int
    evaluations: int
    incarnation: int
    written: float
    torch: str
    files: dict[str, FileRecord]
    losses: dict[int, float | None]
    rounds: list[Fact] = []
    training: dict[str, Json]

    @property
    def position(self) -> Position:
        """Position of the run at this snapshot."""
        return Position.of_checkpoint(self.step, self.calls, self.evaluations)

    def same_state(self, other: "Manifest") -> bool:
        """Return True if both snapshots hold the same bits at the same position, whichever worker wrote them."""
        names = ("files", "losses", "rounds", "training", "position")
        return all(getattr(self, name) == getattr(other, name) for name in names)


class _Format(msgspec.Struct, frozen=True):
    format: str


def write_snapshot(folder: Path, snapshot: Snapshot, origin: Origin, former: Path | None = None) -> Manifest:
    """Write a snapshot into an empty folder; once this returns, it is on the disk and was read back from there.

    Args:
        folder: Empty folder.
        snapshot: State to write.
        origin: Run and plan.
        former: Earlier snapshot of the stage, whose weights' file is shared if the weights are still the same.

    Returns:
        The manifest.

    Raises:
        OSError: The files cannot be written.
        Unsaveable: The state holds a value that cannot be stored.
    """
    tensors: dict[str, torch.Tensor] = {}
    training = {name: encode_state(value, name, tensors) for name, value in training_of(snapshot.state).items()}
    if former is None or not link_tensors(folder / WEIGHTS, former / WEIGHTS, snapshot.state.weights):
        write_tensors(folder / WEIGHTS, snapshot.state.weights)
    others = {TRAINING: tensors, AVERAGES: snapshot.state.averages}
    written = {name: found for name, found in others.items() if found or name in FILES}
    for name, found in written.items():
        write_tensors(folder / name, found)
    manifest = Manifest(
        run=origin.run,
        plan=origin.plan,
        stage=snapshot.stage,
        step=snapshot.step,
        calls=snapshot.calls,
        evaluations=snapshot.evaluations,
        incarnation=snapshot.incarnation,
        written=time(),
        torch=str(torch.__version__),
        files={name: file_record(folder / name) for name in (WEIGHTS, *written)},
        losses=dict(snapshot.losses),
        rounds=[fact_of(each) for each in snapshot.rounds],
        training=training,
    )
    write_manifest(folder, manifest)
    sync(folder)
    return read_manifest(folder)


def problems(folder: Path, stage: int, step: int, origin: Origin) -> list[str]:
    """Return the damages of the snapshot in `folder`, none if it can be used. Reads every byte.

    Args:
        folder: Folder of the snapshot.
        stage: Stage that it must be of.
        step: Step that it must be of.
        origin: Run and plan that it must be of.

    Raises:
        OSError: A fault that may pass.
    """
    try:
        manifest = read_manifest(folder)
    except SnapshotDamaged as damage:
        return damage.problems
    return [*_of_another_place(manifest, stage, step, origin), *_damages(folder, manifest)]


def read_snapshot(folder: Path, stage: int, step: int, origin: Origin, make: Make = empty) -> Snapshot:
    """Return the snapshot in `folder`, verified first.

    Args:
        folder: Folder of the snapshot.
        stage: Stage that it must be of.
        step: Step that it must be of.
        origin: Run and plan that it must be of.
        make: Makes the memory of its tensors.

    Raises:
        SnapshotDamaged: It cannot be used.
        OSError: A fault that may pass.
    """
    if found := problems(folder, stage, step, origin):
        raise SnapshotDamaged(folder, found)
    manifest = read_manifest(folder)
    try:
        files = {name: read_tensors(folder / name, make=make) for name in manifest.files}
        training = {name: decode_state(each, files[TRAINING]) for name, each in manifest.training.items()}
        state = state_of(files[WEIGHTS], files.get(AVERAGES, {}), training)
        rounds = [record_of(each) for each in manifest.rounds]
    except (OSError, ValueError, TypeError, RecursionError, BadStateTree) as error:
        if isinstance(error, OSError) and passing_fault(error):
            raise
        raise SnapshotDamaged(folder, [f"its checksums are right, its contents are not: {error}"]) from error
    position = manifest.calls, manifest.evaluations
    return Snapshot(stage, step, manifest.incarnation, state, manifest.losses, *position, rounds)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and seal the manifest; once this returns, it is on the disk. Raises `OSError`."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    path = folder / MANIFEST
    path.write_bytes(data.replace(UNSEALED.encode(), _seal(data), 1))
    sync(path)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the snapshot in `folder`.

    Raises `SnapshotDamaged`, or `OSError` for a fault that may pass.
    """
    try:
        return parse_manifest((folder / MANIFEST).read_bytes(), folder)
    except FileNotFoundError as error:
        raise SnapshotDamaged(folder, [f"{MANIFEST} is missing"]) from error
    except OSError as error:
        if passing_fault(error):
            raise
        raise SnapshotDamaged(folder, [str(error)]) from error


def parse_manifest(data: bytes, folder: Path) -> Manifest:
    """Return the manifest in `data`, of the snapshot in `folder`. Raises `SnapshotDamaged`."""
    try:
        if (found := msgspec.json.decode(data, type=_Format).format) != FORMAT:
            raise SnapshotDamaged(
                folder, [f"it is of format {found!r}, this stageline reads {FORMAT!r}: install the one that wrote it"]
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (ValueError, RecursionError) as error:  # msgspec's errors are such, and so is text that is not UTF-8
        raise SnapshotDamaged(folder, [f"{MANIFEST} is damaged: {error}"]) from error
    seal = manifest.sha256.encode()
    if _seal(data.replace(seal, UNSEALED.encode(), 1)) != seal:
        raise SnapshotDamaged(folder, [f"{MANIFEST} is damaged: its SHA-256 does not match"])
    return manifest


def training_of(state: StageState) -> dict[str, Any]:
    """Return all of `state` but weights and averages, by the names in `StageState`."""
    previous = state.previous
    return {
        "optimizer": state.optimizer,
        "parameters": state.parameters,
        "lr_scheduler": state.lr_scheduler,
        "buffers": dict(state.buffers),
        "gradients": dict(state.gradients),
        "in_flight": [
            {
                "step": each.step,
                "microbatch": each.microbatch,
                "weights": dict(each.weights),
                "buffers": dict(each.buffers),
            }
            for each in state.in_flight
        ],
        **({"features": dict(state.features)} if state.features else {}),
        **({} if previous is None else {"previous": {"updates": previous.updates, "weights": dict(previous.weights)}}),
    }


def state_of(
    weights: Mapping[str, torch.Tensor], averages: Mapping[str, torch.Tensor], training: dict[str, Any]
) -> StageState:
    """Return the state of a stage; inverse of `training_of`.

    Args:
        weights: Weights by name.
        averages: Averages by name.
        training: Result of `training_of`.

    Raises:
        TypeError: `training` has other fields.
    """
    in_flight = tuple(InFlight(**each) for each in training.pop("in_flight", ()))
    previous = Previous(**training.pop("previous")) if "previous" in training else None
    return StageState(weights, in_flight=in_flight, averages=averages, previous=previous, **training)


def _of_another_place(manifest: Manifest, stage: int, step: int, origin: Origin) -> Iterator[str]:
    if (manifest.stage, manifest.step) != (stage, step):
        yield f"it is of stage {manifest.stage}, step {manifest.step}"
    if manifest.run != origin.run:
        yield f"it is of run {manifest.run}, not of {origin.run}"
    if manifest.plan != origin.plan:
        yield f"it was made under another plan (digest {manifest.plan[:12]}, this one's is {origin.plan[:12]})"


def _damages(folder: Path, manifest: Manifest) -> list[str]:
    if not set(FILES) <= manifest.files.keys() <= KNOWN:
        return [f"it lists the files {', '.join(manifest.files)}"]
    return list(filter(None, (_damage(folder / name, wanted) for name, wanted in manifest.files.items())))


def _damage(path: Path, wanted: FileRecord) -> str:
    """Return how the file differs from its record; "" if it does not."""
    try:
        found = file_record(path)
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        if passing_fault(error):
            raise
        return str(error)
    if found.bytes != wanted.bytes:
        return f"{path.name} has {found.bytes} bytes, written were {wanted.bytes}"
    return "" if found == wanted else f"{path.name} is damaged: its SHA-256 is another than was written"


def file_record(path: Path) -> FileRecord:
    """Return the record of a file in its present state. Raises `OSError`."""
    with path.open("rb", buffering=0) as file:
        return FileRecord(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _seal(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
