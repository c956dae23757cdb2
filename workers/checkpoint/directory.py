"""The folder of a run's snapshots. A snapshot is there whole or not at all, whenever its writer is killed.

    checkpoints/stage-2/step-0000000120/     a snapshot: written aside, verified, then moved here in one instant
    checkpoints/stage-2/.step-…-5fa0c1d2/    one being written or deleted, or left so by a kill; it counts for nothing

A checkpoint is complete when every stage has its snapshot of that step.
"""

import re
import secrets
import shutil
from pathlib import Path

from stageline.pipeline.errors import StagelineError

from .manifest import Manifest, Origin, SnapshotDamaged, read_manifest
from .snapshot import Snapshot, problems, read_snapshot, write_snapshot
from .state_tree import Unsaveable
from .tensor_file import sync

FOLDER = "checkpoints"

_HOME = re.compile(r"stage-(\d+)")
_NAME = re.compile(r"step-(\d{10,})")
_ASIDE = re.compile(rf"\.{_NAME.pattern}-[0-9a-f]+")


class SnapshotFailed(StagelineError):
    """A snapshot could not be written; the text names stage, step, folder and reason."""


class SnapshotsDiffer(SnapshotFailed):
    """The stage was at this step before, with other bits: something in the run is not deterministic."""


class SnapshotDirectory:
    """The snapshots of the run `origin` in `folder`, which several machines may share."""

    def __init__(self, folder: Path, origin: Origin) -> None:
        self.folder = folder
        self.origin = origin

    def place(self, snapshot: Snapshot) -> Path:
        """Writes a snapshot; when this returns, it survives a power failure. Returns its folder.

        If there is one of that step already, it must have the same bits; a damaged one is replaced. Raises
        `SnapshotFailed`; then nothing has changed.
        """
        target = self.path(snapshot.stage, snapshot.step)
        draft = _aside(target)
        try:
            _make(target.parent)
            draft.mkdir()
            manifest = write_snapshot(draft, snapshot, self.origin)
            self._move(draft, target, manifest)
            sync(target.parent)
        except (OSError, Unsaveable, SnapshotDamaged) as error:
            raise SnapshotFailed(
                f"stage {snapshot.stage} could not write its snapshot of step {snapshot.step} to {target.parent}: "
                f"{error}. What was there before is untouched; mend this and resume the run"
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return target

    def load(self, stage: int, step: int) -> Snapshot:
        """A stage's snapshot of a step, verified. Raises `SnapshotDamaged`."""
        return read_snapshot(self.path(stage, step), stage, step, self.origin)

    def verify(self, stage: int, step: int) -> list[str]:
        """All that is wrong with a stage's snapshot of a step; nothing if it can be used. Every byte is read."""
        return problems(self.path(stage, step), stage, step, self.origin)

    def steps(self, stage: int) -> list[int]:
        """The steps of which there are snapshots of `stage`, ascending; they may be damaged. Raises `OSError`."""
        names = (_NAME.fullmatch(path.name) for path in _entries(self._home(stage)))
        return sorted(int(name[1]) for name in names if name)

    def present(self) -> list[tuple[int, int]]:
        """Stage and step of each snapshot of any stage; they may be damaged. Raises `OSError`."""
        homes = (_HOME.fullmatch(path.name) for path in _entries(self.folder))
        return sorted((int(name[1]), step) for name in homes if name for step in self.steps(int(name[1])))

    def forget(self, stage: int, below: int) -> None:
        """Deletes the stage's snapshots of steps before `below`, an announced complete checkpoint. Never by count: a
        stage that is ahead by several intervals has several newer ones. Raises `SnapshotFailed`."""
        self._delete(stage, [step for step in self.steps(stage) if step < below])

    def abandon(self, stage: int, above: int) -> None:
        """Deletes the stage's snapshots of steps after `above`: for a run that goes on from there as a whole, perhaps
        with other software and other bits. Raises `SnapshotFailed`."""
        self._delete(stage, [step for step in self.steps(stage) if step > above])

    def tidy(self, stage: int) -> None:
        """Deletes what killed processes have left half written or half deleted. Only for the owner of `stage`. Raises
        `SnapshotFailed` if the folder cannot be read."""
        try:
            leftovers = [path for path in _entries(self._home(stage)) if _ASIDE.fullmatch(path.name)]
        except OSError as error:
            raise SnapshotFailed(f"stage {stage} cannot keep its snapshots there: {error}") from error
        for path in leftovers:
            shutil.rmtree(path, ignore_errors=True)

    def path(self, stage: int, step: int) -> Path:
        """Where a stage's snapshot of a step lies, or would."""
        return self._home(stage) / f"step-{step:010d}"

    def _home(self, stage: int) -> Path:
        return self.folder / f"stage-{stage}"

    def _move(self, draft: Path, target: Path, manifest: Manifest) -> None:
        if target.exists() and not self.verify(manifest.stage, manifest.step):
            _demand_same_state(target, read_manifest(target), manifest)
            return
        if target.exists():
            _remove(target)
        draft.rename(target)

    def _delete(self, stage: int, steps: list[int]) -> None:
        for step in steps:
            try:
                _remove(self.path(stage, step))
            except FileNotFoundError:
                continue  # a process that held the stage before has done it
            except OSError as error:
                raise SnapshotFailed(f"stage {stage} could not delete its old snapshot: {error}") from error


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}-{secrets.token_hex(4)}")


def _remove(path: Path) -> None:
    """In one instant for whoever looks. What cannot be deleted is left aside for `tidy`."""
    aside = path.rename(_aside(path))
    shutil.rmtree(aside, ignore_errors=True)


def _make(folder: Path) -> None:
    """Makes a folder, and has it on the disk; those above it too if they are new."""
    if not folder.exists():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def _demand_same_state(path: Path, there: Manifest, mine: Manifest) -> None:
    if not there.same_state(mine):
        raise SnapshotsDiffer(
            f"stage {mine.stage} came to step {mine.step} with other bits than before: {path}, written under "
            f"incarnation {there.incarnation} with torch {there.torch}, differs from what incarnation "
            f"{mine.incarnation} has with torch {mine.torch}. Something in the run is not deterministic, or software "
            f"or hardware have changed: resume the run as a whole"
        )
