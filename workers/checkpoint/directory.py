"""Folder of a run's snapshots. A snapshot is there whole or not at all, whenever its writer is killed.

    checkpoints/stage-2/step-0000000120/            a snapshot: written as a draft, verified, then renamed
    checkpoints/stage-2/.step-0000000120-5fa0c1d2/  a draft: being written or deleted, or left so by a kill; ignored

A checkpoint is complete when every stage has its snapshot of that step.
"""

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from stageline.pipeline.plan import Plan
from stageline.pipeline.schedule import Schedule
from stageline.pipeline.stage.layers.memory import empty
from stageline.workers.disk.atomic_file import draft_of, make_folder, publish, remove_folder, sync
from stageline.workers.disk.background_writer import WriteFailed
from stageline.workers.disk.tensor_file import Make, Unsaveable

from .snapshot import (
    MANIFEST,
    Manifest,
    Origin,
    Snapshot,
    SnapshotDamaged,
    problems,
    read_manifest,
    read_snapshot,
    write_snapshot,
)

FOLDER = "checkpoints"
KEPT = 2  # newest snapshots of a stage, which no announcement deletes

_STAGE = re.compile(r"stage-(\d+)")
_STEP = re.compile(r"step-(\d{10,})")
_DRAFT = re.compile(rf"\.{_STEP.pattern}-[0-9a-f]+")


class SnapshotFailed(WriteFailed):
    """Error that a snapshot cannot be written.

    Mend: Make room on the disk or make the folder writable, and resume the run: older snapshots are untouched.

    Example: stage 1 could not write its snapshot of step 40 to runs/a/checkpoints: No space left on device. Older
    snapshots are untouched; repair this and resume the run
    """

    error_code = "SL401"


class SnapshotsDiffer(SnapshotFailed):
    """Error that a step was computed again with other bits: something in the run is not deterministic.

    Mend: See that all operations are deterministic (`stageline doctor`) and that software and hardware have not
    changed, then resume the run as a whole.

    Example: stage 1 came to step 40 with other bits than before: runs/a/checkpoints/stage-1/40, written under
    incarnation 2 with torch 2.9.0, differs from what incarnation 3 has with torch 2.9.1. Something in the run is not
    deterministic, or software or hardware have changed: resume the run as a whole
    """

    error_code = "SL402"


@dataclass
class SnapshotDirectory:
    """Snapshots of one run, `origin`, in `folder`. Several machines may share the folder."""

    folder: Path
    origin: Origin
    _left: set[Path] = field(default_factory=set, repr=False)  # drafts that could not be removed

    @classmethod
    def of(cls, folder: Path, run: str, plan: Plan) -> Self:
        """Return the snapshots of a run.

        Args:
            folder: Folder of the run, or of a saved checkpoint.
            run: Id of the run.
            plan: Plan under which they were made.
        """
        return cls(folder / FOLDER, Origin(run, plan.digest()))

    def write(self, snapshot: Snapshot) -> Path:
        """Write a snapshot and return its folder; once this returns, it survives a power failure.

        A snapshot of the same step that is there already must have the same bits; a damaged one is replaced. Raises
        `SnapshotFailed`; then nothing has changed.
        """
        target = self.path(snapshot.stage, snapshot.step)
        draft = draft_of(target)
        self._remove(*self._left)  # they may be what fills the disk
        try:
            make_folder(target.parent)
            draft.mkdir()
            manifest = write_snapshot(draft, snapshot, self.origin, self._former(snapshot))
            self._publish(draft, target, manifest)
        except (OSError, Unsaveable, SnapshotDamaged) as error:
            raise SnapshotFailed(
                f"stage {snapshot.stage} could not write its snapshot of step {snapshot.step} to {target.parent}: "
                f"{error}. Older snapshots are untouched; repair this and resume the run"
            ) from error
        finally:
            self._remove(draft)
        return target

    def receive(self, draft: Path, stage: int, step: int) -> None:
        """Make a snapshot of the files in `draft`, which another worker has sent; once this returns, it is on the disk.

        Args:
            draft: Folder with the files, beside where the snapshot is to be.
            stage: Stage that the snapshot must be of.
            step: Step that it must be of.

        Raises:
            SnapshotDamaged: The files are not those of such a snapshot.
            SnapshotsDiffer: One with other bits is there already.
            OSError: A fault that may pass.
        """
        if wrong := problems(draft, stage, step, self.origin):
            raise SnapshotDamaged(draft, wrong)
        manifest = read_manifest(draft)
        for name in (*manifest.files, MANIFEST):
            sync(draft / name)
        sync(draft)
        self._publish(draft, self.path(stage, step), manifest)

    def load(self, stage: int, step: int, make: Make = empty) -> Snapshot:
        """Return a stage's snapshot of a step, verified.

        Args:
            stage: Index of the stage.
            step: Number of steps done.
            make: Makes the memory of its tensors.

        Raises:
            SnapshotDamaged: It cannot be used.
            OSError: A fault that may pass.
        """
        return read_snapshot(self.path(stage, step), stage, step, self.origin, make)

    def verify(self, stage: int, step: int) -> list[str]:
        """Return the damages of a stage's snapshot of a step, none if it can be used. Reads every byte.

        Raises `OSError` for a fault that may pass.
        """
        return problems(self.path(stage, step), stage, step, self.origin)

    def steps(self, stage: int) -> list[int]:
        """Return the steps of the stage's snapshots, ascending. Snapshots may be damaged. Raises `OSError`."""
        names = (_STEP.fullmatch(path.name) for path in _entries(self._folder_of(stage)))
        return sorted(int(name[1]) for name in names if name)

    def present(self) -> list[tuple[int, int]]:
        """Return stage and step of every snapshot of any stage. Snapshots may be damaged. Raises `OSError`."""
        names = (_STAGE.fullmatch(path.name) for path in _entries(self.folder))
        return sorted((int(name[1]), step) for name in names if name for step in self.steps(int(name[1])))

    def delete_before(self, stage: int, complete: int, best: int | None = None) -> None:
        """Delete the stage's snapshots of steps before `complete`. Raises `SnapshotFailed`.

        The newest two always stay. Snapshots are never deleted by count alone: a stage that is ahead by several
        intervals has several newer ones.

        Args:
            stage: Index of the stage.
            complete: Step of an announced complete checkpoint.
            best: Step whose snapshot stays.
        """
        self._delete(stage, [step for step in self.steps(stage)[:-KEPT] if step < complete and step != best])

    def delete_after(self, stage: int, start: int, since: int) -> None:
        """Delete the stage's snapshots of steps after `start` written under incarnation `since` or an older one.

        This is for a run that was resumed from `start` as a whole, perhaps with other software, batches and bits.
        Raises `SnapshotFailed`.

        Args:
            stage: Index of the stage.
            start: Step from which the run was resumed.
            since: Newest incarnation whose snapshots go.
        """
        newer = [step for step in self.steps(stage) if step > start]
        self._delete(stage, [step for step in newer if self._is_former(stage, step, since)])

    def delete_drafts(self, stage: int) -> None:
        """Delete drafts that killed processes have left half written or half deleted. Only for the owner of `stage`.

        Raises `SnapshotFailed` if the folder cannot be read.
        """
        try:
            drafts = [path for path in _entries(self._folder_of(stage)) if _DRAFT.fullmatch(path.name)]
        except OSError as error:
            raise SnapshotFailed(f"stage {stage} cannot keep its snapshots there: {error}") from error
        for path in drafts:
            shutil.rmtree(path, ignore_errors=True)

    def path(self, stage: int, step: int) -> Path:
        """Return the folder of a stage's snapshot of a step; it need not exist."""
        return self._folder_of(stage) / f"step-{step:010d}"

    def _is_former(self, stage: int, step: int, since: int) -> bool:
        """Return True if incarnation `since` or an older one wrote the snapshot, or if its writer is unknown."""
        try:
            return read_manifest(self.path(stage, step)).incarnation <= since
        except (SnapshotDamaged, OSError):
            return True

    def _former(self, snapshot: Snapshot) -> Path | None:
        """Return the snapshot whose weights' file `snapshot` may share, None if there is none.

        A stage without an optimizer never changes its weights. The last but one snapshot is taken, so that two
        checkpoints in a row are never damaged together.
        """
        if snapshot.state.optimizer is not None:
            return None
        earlier = [step for step in self.steps(snapshot.stage) if step < snapshot.step]
        return self.path(snapshot.stage, earlier[-2]) if len(earlier) > 1 else None

    def _remove(self, *drafts: Path) -> None:
        for draft in drafts:
            shutil.rmtree(draft, ignore_errors=True)
        self._left = {draft for draft in {*self._left, *drafts} if draft.exists()}

    def _folder_of(self, stage: int) -> Path:
        return self.folder / f"stage-{stage}"

    def _publish(self, draft: Path, target: Path, manifest: Manifest) -> None:
        if not target.exists():
            publish(draft, target)
        elif self.verify(manifest.stage, manifest.step):  # damaged
            remove_folder(target)
            publish(draft, target)
        else:
            if not (there := read_manifest(target)).same_state(manifest):
                raise SnapshotsDiffer(
                    f"stage {manifest.stage} came to step {manifest.step} with other bits than before: {target}, "
                    f"written under incarnation {there.incarnation} with torch {there.torch}, differs from what "
                    f"incarnation {manifest.incarnation} has with torch {manifest.torch}. Something in the run is not "
                    "deterministic, or software or hardware have changed: resume the run as a whole"
                )
            sync(target.parent)  # the worker that wrote it may have died before it did so

    def _delete(self, stage: int, steps: list[int]) -> None:
        for step in steps:
            try:
                remove_folder(self.path(stage, step))
            except FileNotFoundError:
                continue  # deleted by a process that held the stage before
            except OSError as error:
                raise SnapshotFailed(f"stage {stage} could not delete its old snapshot: {error}") from error


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def beginning_of(stage: int, step: int, schedule: Schedule, checkpoints: SnapshotDirectory) -> int:
    """Return the stage or replica whose snapshot of `step` has the state of `stage`.

    At one step all replicas have the same state: a machine without its own replica's snapshot takes another's. Only the
    first replica of the last stage needs its own, which has the losses and the evaluations.

    Args:
        stage: Stage or replica to begin.
        step: Number of steps done.
        schedule: Schedule of the run.
        checkpoints: Snapshots here.
    """
    if stage == schedule.stages - 1 or checkpoints.path(stage, step).exists():
        return stage
    others = (each for each in schedule.replicas.others(stage) if checkpoints.path(each, step).exists())
    return next(others, stage)
