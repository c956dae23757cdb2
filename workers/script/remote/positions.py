"""Keeps the position of every checkpoint that may be gone on from, where only workers on other machines have snapshots.

positions.json    {"20": [23, 2], ...}    after 20 steps, 23 calls and 2 evaluated batches were done
"""

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from stageline.workers.checkpoint.snapshot import SnapshotDamaged
from stageline.workers.disk.atomic_file import persist_json, write_json
from stageline.workers.runtime.calls import Position

log = structlog.get_logger()

NAME = "positions.json"
_CHECKPOINTS = 8  # newest, of which one is complete or none was long ago
_STEPS = 16  # newest: the run may be stopped after any of them


class PositionFile:
    """In the run's `folder`, which has snapshots of every `every` steps. One thread notes; any may write."""

    def __init__(self, folder: Path, every: int) -> None:
        self._file = folder / NAME
        self._every = every
        self._kept = self._written = self._read()
        self._writing = threading.Lock()

    def note(self, position: Position) -> None:
        """Comes before the call that leads to `position`. On the disk if a snapshot of it is due."""
        kept = {step: each for step, each in self._kept.items() if self._may_matter(step, position.step)}
        self._kept = {**kept, position.step: position}
        if self._every and position.step % self._every == 0:
            self._write(persist_json)

    def keep(self) -> None:
        """Writes all, since the run ends and may be gone on from after any step. In one attempt: a disk that cannot be
        written to is logged, and does not keep the run from ending."""
        try:
            self._write(write_json)
        except OSError as error:
            log.warning("positions not written", reason=f"the run cannot be resumed at its last steps: {error}")

    def _write(self, write: Callable[[Path, object], None]) -> None:
        with self._writing:
            kept = self._kept
            if kept != self._written:
                write(self._file, {str(step): (each.calls, each.evaluations) for step, each in kept.items()})
                self._written = kept

    def read(self, step: int) -> Position:
        """Of the checkpoint of `step`. Raises `SnapshotDamaged` if it is not known."""
        if not step:
            return Position()
        if step not in self._kept:
            raise SnapshotDamaged(self._file, [f"it does not say how many calls came before step {step}"])
        return self._kept[step]

    def _may_matter(self, step: int, newest: int) -> bool:
        """Also false for what was called before the run went back to a checkpoint."""
        ahead = newest - step
        of_checkpoint = bool(self._every) and step % self._every == 0 and ahead <= _CHECKPOINTS * self._every
        return 0 < ahead <= _STEPS or (ahead > 0 and of_checkpoint)

    def _read(self) -> dict[int, Position]:
        try:
            found = msgspec.json.decode(self._file.read_bytes(), type=dict[int, tuple[int, int]])
        except FileNotFoundError:
            return {}
        except msgspec.MsgspecError as error:
            raise SnapshotDamaged(self._file, [str(error)]) from error
        return {step: Position.of_checkpoint(step, *counts) for step, counts in found.items()}
