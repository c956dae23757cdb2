"""One snapshot on disk: a folder of three files.

weights.safetensors    the stage's part of the model's state_dict, under the unsplit model's names
training.safetensors   the other tensors: optimizer state, and what microbatches in flight have read
manifest.json          all that is no tensor, and the size and SHA-256 of every file
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any

import torch
from torch import Tensor

from stageline.pipeline.stage.state import InFlight, StageState

from .manifest import Manifest, Origin, SnapshotDamaged, read_manifest, write_manifest
from .state_tree import BadStateTree, put_together, take_apart
from .tensor_file import FileRecord, read, record, sync, write

WEIGHTS = "weights.safetensors"
TRAINING = "training.safetensors"
FILES = (WEIGHTS, TRAINING)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one stage after `step` steps, as its owner under `incarnation` has it.

    `losses`, on the last stage, are those before `step` that the run has still to know, by step; None for a step
    without rows. All of them and not only the latest, since older snapshots are deleted.
    """

    stage: int
    step: int
    incarnation: int
    state: StageState
    losses: Mapping[int, float | None] = field(default_factory=dict)


def write_snapshot(folder: Path, snapshot: Snapshot, origin: Origin) -> Manifest:
    """Writes into an empty `folder`. When it returns, all is on the disk and was read back from there.

    Raises `OSError`, and `Unsaveable` if the state holds a value that has no form there.
    """
    tensors: dict[str, Tensor] = {}
    training = {name: take_apart(value, name, tensors) for name, value in _training(snapshot.state).items()}
    notes = write(folder / WEIGHTS, snapshot.state.weights) | write(folder / TRAINING, tensors)
    manifest = Manifest(
        run=origin.run,
        plan=origin.plan,
        stage=snapshot.stage,
        step=snapshot.step,
        incarnation=snapshot.incarnation,
        written=time(),
        torch=str(torch.__version__),
        files={name: record(folder / name) for name in FILES},
        losses=dict(snapshot.losses),
        training=training,
        notes=notes,
    )
    write_manifest(folder, manifest)
    sync(folder)
    return read_manifest(folder)


def problems(folder: Path, stage: int, step: int, origin: Origin) -> list[str]:
    """All that is wrong with the snapshot in `folder`; nothing if it can be used. Every byte is read."""
    try:
        manifest = read_manifest(folder)
    except SnapshotDamaged as damage:
        return damage.problems
    return [*_of_another_place(manifest, stage, step, origin), *_damages(folder, manifest)]


def read_snapshot(folder: Path, stage: int, step: int, origin: Origin) -> Snapshot:
    """The snapshot in `folder`, verified first. Raises `SnapshotDamaged`."""
    if found := problems(folder, stage, step, origin):
        raise SnapshotDamaged(folder, found)
    manifest = read_manifest(folder)
    try:
        weights = read(folder / WEIGHTS, manifest.notes)
        tensors = read(folder / TRAINING, manifest.notes)
        state = _state(weights, {name: put_together(each, tensors) for name, each in manifest.training.items()})
    except (OSError, ValueError, TypeError, RecursionError, BadStateTree) as error:
        raise SnapshotDamaged(folder, [f"its checksums are right, its contents are not: {error}"]) from error
    return Snapshot(stage, step, manifest.incarnation, state, manifest.losses)


def _training(state: StageState) -> dict[str, Any]:
    return {
        "optimizer": state.optimizer,
        "lr_scheduler": state.lr_scheduler,
        "buffers": dict(state.buffers),
        "gradients": dict(state.gradients),
        "in_flight": [_fields(each) for each in state.in_flight],
    }


def _fields(each: InFlight) -> dict[str, Any]:
    return {
        "step": each.step,
        "microbatch": each.microbatch,
        "weights": dict(each.weights),
        "buffers": dict(each.buffers),
    }


def _state(weights: Mapping[str, Tensor], training: dict[str, Any]) -> StageState:
    """Raises `TypeError` if `training` has other fields."""
    in_flight = tuple(InFlight(**each) for each in training.pop("in_flight", ()))
    return StageState(weights, in_flight=in_flight, **training)


def _of_another_place(manifest: Manifest, stage: int, step: int, origin: Origin) -> Iterator[str]:
    if (manifest.stage, manifest.step) != (stage, step):
        yield f"it is of stage {manifest.stage}, step {manifest.step}"
    if manifest.run != origin.run:
        yield f"it is of run {manifest.run}, not of {origin.run}"
    if manifest.plan != origin.plan:
        yield f"it was made under another plan (digest {manifest.plan[:12]}, this one's is {origin.plan[:12]})"


def _damages(folder: Path, manifest: Manifest) -> Iterator[str]:
    if manifest.files.keys() != set(FILES):
        yield f"it says that it has the files {', '.join(manifest.files)}"
        return
    for name, wanted in manifest.files.items():
        if damage := _damage(folder / name, wanted):
            yield damage


def _damage(path: Path, wanted: FileRecord) -> str | None:
    try:
        size = path.stat().st_size
        if size != wanted.bytes:
            return f"{path.name} has {size} bytes, written were {wanted.bytes}"
        return None if record(path) == wanted else f"{path.name} is damaged: its SHA-256 is another than was written"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return str(error)
