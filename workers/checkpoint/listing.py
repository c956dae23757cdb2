"""Lists the checkpoints in a folder, and what is wrong with their snapshots.

The workers of a run that goes on delete old snapshots meanwhile: those are left out.
"""

from collections.abc import Iterator

import msgspec

from .snapshot import SnapshotDamaged, read_manifest
from .source import CheckpointSource


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint of schema checkpoint-ls/1: of `step`, with snapshots of `stages` here; `complete` if these are
    all. `bytes` are those of its tensors, `written` when the last of it was, in seconds since the epoch. `damages` are
    those of the manifests: no other file is read. `best`: of the best evaluation so far, and kept for that."""

    step: int
    stages: tuple[int, ...]
    complete: bool
    bytes: int
    written: float | None
    damages: tuple[str, ...] = ()
    best: bool = False


class SnapshotState(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot of schema checkpoint-verify/1, every byte of which was read. `label` is the stage's, for people."""

    stage: int
    label: str
    step: int
    folder: str
    damages: tuple[str, ...]


def checkpoint_rows(source: CheckpointSource) -> list[CheckpointRow]:
    """All that are here, the oldest first. Raises `OSError`."""
    rows = [row for step, stages in source.present.items() if (row := _row(source, step, sorted(stages))).stages]
    try:
        best = source.best
    except SnapshotDamaged:  # its row says so
        best = None
    return [msgspec.structs.replace(row, best=True) if row.step == best else row for row in rows]


def snapshot_states(source: CheckpointSource, step: int | None) -> Iterator[SnapshotState]:
    """Of all snapshots here, or of those of `step`. Raises `OSError`."""
    for each, stages in source.present.items():
        for stage in sorted(stages) if step in (None, each) else ():
            wrong = tuple(source.snapshots.verify(stage, each))
            folder = source.snapshots.path(stage, each)
            if not wrong or folder.exists():
                yield SnapshotState(
                    stage=stage, label=source.label(stage), step=each, folder=str(folder), damages=wrong
                )


def _row(source: CheckpointSource, step: int, stages: list[int]) -> CheckpointRow:
    size, written, damages = 0, None, []
    there: list[int] = []
    for stage in stages:
        folder = source.snapshots.path(stage, step)
        try:
            manifest = read_manifest(folder)
        except SnapshotDamaged as damage:
            if folder.exists():
                there.append(stage)
                damages.append(str(damage))
            continue
        there.append(stage)
        size += sum(file.bytes for file in manifest.files.values())
        written = max(written or 0.0, manifest.written)
    complete = len(there) == source.stages and not damages
    return CheckpointRow(
        step=step, stages=tuple(there), complete=complete, bytes=size, written=written, damages=tuple(damages)
    )
