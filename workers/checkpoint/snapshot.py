"""One snapshot on disk: a folder of three files.

weights.safetensors    the stage's part of the model's state_dict, under the unsplit model's names
training.safetensors   the other tensors: optimizer state, and what the forwards of microbatches in flight have read
manifest.json          everything that is not a tensor, and the size and SHA-256 of the other files
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any

import torch
from torch import Tensor

from stageline.pipeline.stage.state import InFlight, StageState
from stageline.workers.disk.atomic_file import sync
from stageline.workers.disk.tensor_file import read_tensors, write_tensors

from .manifest import FileRecord, Manifest, Origin, SnapshotDamaged, file_record, read_manifest, write_manifest
from .state_tree import BadStateTree, decode_state, encode_state

WEIGHTS = "weights.safetensors"
TRAINING = "training.safetensors"
FILES = (WEIGHTS, TRAINING)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one stage after `step` steps, taken by its worker under `incarnation`.

    `losses`, on the last stage, are the losses before `step` that the run still has to report, by step; None for a step
    without rows. All of them and not only the latest, since older snapshots are deleted.
    """

    stage: int
    step: int
    incarnation: int
    state: StageState
    losses: Mapping[int, float | None] = field(default_factory=dict)


def write_snapshot(folder: Path, snapshot: Snapshot, origin: Origin) -> Manifest:
    """Writes into an empty `folder`. When this returns, everything is on the disk and was read back from there.

    Raises `OSError`, and `Unsaveable` if the state holds a value that cannot be stored.
    """
    tensors: dict[str, Tensor] = {}
    training = {name: encode_state(value, name, tensors) for name, value in _training(snapshot.state).items()}
    write_tensors(folder / WEIGHTS, snapshot.state.weights)
    write_tensors(folder / TRAINING, tensors)
    manifest = Manifest(
        run=origin.run,
        plan=origin.plan,
        stage=snapshot.stage,
        step=snapshot.step,
        incarnation=snapshot.incarnation,
        written=time(),
        torch=str(torch.__version__),
        files={name: file_record(folder / name) for name in FILES},
        losses=dict(snapshot.losses),
        training=training,
    )
    write_manifest(folder, manifest)
    sync(folder)
    return read_manifest(folder)


def problems(folder: Path, stage: int, step: int, origin: Origin) -> list[str]:
    """What is wrong with the snapshot in `folder`; nothing if it can be used. Reads every byte."""
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
        weights, tensors = read_tensors(folder / WEIGHTS), read_tensors(folder / TRAINING)
        state = _state(weights, {name: decode_state(each, tensors) for name, each in manifest.training.items()})
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
        yield f"it lists the files {', '.join(manifest.files)}"
        return
    for name, wanted in manifest.files.items():
        if damage := _damage(folder / name, wanted):
            yield damage


def _damage(path: Path, wanted: FileRecord) -> str | None:
    try:
        size = path.stat().st_size
        if size != wanted.bytes:
            return f"{path.name} has {size} bytes, written were {wanted.bytes}"
        return (
            None if file_record(path) == wanted else f"{path.name} is damaged: its SHA-256 is another than was written"
        )
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return str(error)
