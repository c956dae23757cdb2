"""What a worker does between steps so that it can be replaced, and how a replacement begins.

every `snapshot_every` steps   a copy of each stage's state -> writing thread -> disk -> reported as durable
checkpoint C is announced      snapshots older than the complete checkpoint before C are deleted
a replacement                  restores the state of C, rewinds its queues to C, and runs the program from C on
"""

from time import monotonic
from types import TracebackType
from typing import Self

from stageline.broker.control.protocol import Assigned, Inspection
from stageline.broker.recovery.checkpoint_tracker import is_gone
from stageline.pipeline.plan import Plan
from stageline.workers.runs import folder as runs
from stageline.workers.runtime.executor import Executor
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.loop import PATIENCE
from stageline.workers.runtime.progress import Progress

from .directory import FOLDER, SnapshotDirectory, SnapshotFailed
from .manifest import Origin, SnapshotDamaged
from .snapshot import Snapshot
from .writer import SnapshotWriter

LONGEST_WRITE = 120.0  # seconds that the compute loop waits for the disk before the run fails


class CheckpointHooks:
    """What a worker does between steps so that another worker can replace it: without recovery, nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ends the writing. After an error, snapshots that wait to be written are dropped."""

    def stepped(self, stage: int, step: int, loss: float | None) -> None:
        """Called when `stage` has finished `step`. Raises `SnapshotFailed`."""

    def forget(self, complete: int) -> None:
        """Called when the broker announces the checkpoint of step `complete`: older ones may be deleted."""

    def flush(self) -> None:
        """Waits until all snapshots are on the disk. Raises `SnapshotFailed`."""

    def stop_at(self, step: int) -> None:
        """Called when the run is to stop with the checkpoint of `step`: a snapshot of that step is due, too."""


class LocalSnapshots:
    """The snapshots of a run, as a worker without stages sees them before it is assigned some."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def snapshots(self, run: str) -> list[tuple[int, int]] | None:
        """(stage, step) of each snapshot; None if the folder cannot be read."""
        try:
            return _checkpoints(self._plan, run).present()
        except OSError:
            return None

    def can_begin(self, assigned: Assigned) -> bool:
        """Whether the assignment can be accepted: not if the snapshots to begin with were deleted after newer ones."""
        mine = self._plan.workers[assigned.index].stages
        return not is_gone(assigned.step, mine, self.snapshots(assigned.run) or [])

    def inspect(self, run: str, step: int, claim: int | None) -> Inspection:
        """Which snapshots of `step` are whole: of the stages of worker `claim`, or of all stages that have one."""
        checkpoints = _checkpoints(self._plan, run)
        there = [stage for stage, of in self.snapshots(run) or [] if of == step]
        stages = there if claim is None else self._plan.workers[claim].stages
        found = {stage: checkpoints.verify(stage, step) for stage in stages}
        damages = [
            str(SnapshotDamaged(checkpoints.path(stage, step), wrong)) for stage, wrong in found.items() if wrong
        ]
        return Inspection(step, [stage for stage, wrong in found.items() if not wrong], damages)

    def abandon(self, assigned: Assigned) -> None:
        """Deletes the assigned stages' snapshots of steps after the assignment's first. Raises `SnapshotFailed`."""
        checkpoints = _checkpoints(self._plan, assigned.run)
        for stage in self._plan.workers[assigned.index].stages:
            checkpoints.delete_after(stage, assigned.step)


class SnapshotHooks(CheckpointHooks):
    """Recovery by snapshots, for one worker's stages. Unless `start` is 0, they are restored to the checkpoint `start`.

    Raises `SnapshotDamaged` and `ForeignState` if that cannot be used.
    """

    def __init__(
        self, job: Job, executor: Executor, progress: Progress, *, run: str, incarnation: int, start: int
    ) -> None:
        self._job = job
        self._executor = executor
        self._progress = progress
        self._incarnation = incarnation
        self._stop_at: int | None = None
        self._newest = start  # the newest complete checkpoint that was announced
        self._checkpoints = _checkpoints(job.plan, run)
        if start:
            self._restore(start)
        self._writer = SnapshotWriter(self._checkpoints, executor.stages, progress.durable)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._writer.close(0.0 if error else PATIENCE)

    def stepped(self, stage: int, step: int, loss: float | None) -> None:
        done, last = step + 1, stage == self._job.route.stages - 1
        if last and step % self._job.plan.run.log_every == 0:
            self._progress.losses[step] = loss
        if done % self._job.plan.recovery.snapshot_every and done not in (self._job.steps, self._stop_at):
            return
        self._wait_for_room(stage)
        state = self._executor.stages[stage].snapshot()
        self._writer.write(Snapshot(stage, done, self._incarnation, state, self._losses(step, loss) if last else {}))

    def forget(self, complete: int) -> None:
        """Keeps the complete checkpoint before `complete`: a run that is resumed can begin there if `complete` is
        damaged. Newer snapshots are kept in any case."""
        if complete > self._newest:
            self.delete_before(self._newest)
            self._newest = complete

    def delete_before(self, step: int) -> None:
        """Deletes what no run can begin with any more. Returns at once."""
        self._writer.delete_before(step)

    def stop_at(self, step: int) -> None:
        self._stop_at = step

    def flush(self) -> None:
        if not self._writer.flush(LONGEST_WRITE):
            raise self._too_slow()

    def _restore(self, step: int) -> None:
        for index, stage in self._executor.stages.items():
            snapshot = self._checkpoints.load(index, step)
            stage.restore(snapshot.state)
            self._progress.restored(snapshot.losses)

    def _losses(self, step: int, loss: float | None) -> dict[int, float | None]:
        """The losses that a run keeps, and that of `step`, which may be its last. The same for every worker."""
        every = self._job.plan.run.log_every
        return {each: kept for each, kept in self._progress.losses.items() if each % every == 0} | {step: loss}

    def _wait_for_room(self, stage: int) -> None:
        deadline = monotonic() + LONGEST_WRITE
        while not self._writer.has_room(stage, PATIENCE):
            self._progress.waits = True
            if monotonic() > deadline:
                raise self._too_slow()

    def _too_slow(self) -> SnapshotFailed:
        return SnapshotFailed(f"after {LONGEST_WRITE:g} s, the disk is still busy with {self._writer.doing}")


def _checkpoints(plan: Plan, run: str) -> SnapshotDirectory:
    return SnapshotDirectory(runs.folder(plan, run) / FOLDER, Origin(run, plan.digest()))
