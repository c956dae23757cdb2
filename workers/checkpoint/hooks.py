"""What a worker does between steps so that it can be replaced, and how a replacement begins.

every `snapshot_every` steps   a copy of each stage's state -> writing thread -> disk -> reported as durable
checkpoint C is announced      snapshots older than the complete checkpoint before C are deleted
a replacement                  restores the state of C, rewinds its queues to C, and runs the program from C on
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from stageline.broker.control.protocol import Assigned, Inspection
from stageline.broker.recovery.checkpoint_tracker import is_gone
from stageline.pipeline.plan import Plan
from stageline.pipeline.stage.state import StageState
from stageline.workers.runs import folder as runs
from stageline.workers.runtime.executor import Executor
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.loop import PATIENCE
from stageline.workers.runtime.progress import Progress

from .directory import FOLDER, SnapshotDirectory, SnapshotFailed
from .snapshot import Origin, Snapshot, SnapshotDamaged
from .writer import SnapshotWriter

LONGEST_WRITE = 120.0  # seconds that the compute loop waits for the disk before the run fails


class Restorable(Protocol):
    """A stage, as far as snapshots go."""

    def snapshot(self) -> StageState:
        """A copy of its state."""

    def restore(self, state: StageState) -> None:
        """Sets its state. Raises `ForeignState`."""


class SnapshotQueue(Protocol):
    """What writes snapshots in the background. All times in seconds; its methods raise `SnapshotFailed`."""

    doing: str  # what it is writing, for people

    def has_room(self, stage: int, timeout: float) -> bool:
        """Whether a snapshot of `stage` can be handed over now; waits for that up to `timeout`."""

    def write(self, snapshot: Snapshot) -> None:
        """Hands a snapshot over; returns at once."""

    def delete_before(self, complete: int) -> None:
        """Snapshots from before step `complete` may be deleted; returns at once."""

    def flush(self, timeout: float) -> bool:
        """Whether all that was handed over is on disk; waits for that."""

    def close(self, timeout: float) -> None:
        """Ends the writing, once all that was handed over is on disk, or after `timeout`."""


class CheckpointHooks(AbstractContextManager["CheckpointHooks"]):
    """What a worker does between steps so that another worker can replace it: without recovery, nothing."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
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
        damaged = [SnapshotDamaged(checkpoints.path(stage, step), wrong) for stage, wrong in found.items() if wrong]
        return Inspection(step, [stage for stage, wrong in found.items() if not wrong], [str(each) for each in damaged])

    def abandon(self, assigned: Assigned) -> None:
        """Deletes the assigned stages' snapshots of steps after the assignment's first. Raises `SnapshotFailed`."""
        checkpoints = _checkpoints(self._plan, assigned.run)
        for stage in self._plan.workers[assigned.index].stages:
            checkpoints.delete_after(stage, assigned.step)


class SnapshotHooks(CheckpointHooks):
    """Recovery by snapshots of one worker's `stages`, whose state is that of checkpoint `start`.

    A snapshot is written every `every` steps and after the last of `steps`; on stage `last` it holds the losses of
    every `log_every`-th step.
    """

    def __init__(
        self,
        stages: Mapping[int, Restorable],
        progress: Progress,
        writer: SnapshotQueue,
        *,
        incarnation: int,
        start: int,
        steps: int,
        last: int,
        every: int,
        log_every: int,
    ) -> None:
        self._stages = stages
        self._progress = progress
        self._writer = writer
        self._incarnation = incarnation
        self._newest = start  # the newest complete checkpoint that was announced
        self._steps = steps
        self._last = last
        self._every = every
        self._log_every = log_every
        self._stop_at: int | None = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._writer.close(0.0 if error else PATIENCE)

    def stepped(self, stage: int, step: int, loss: float | None) -> None:
        done, last = step + 1, stage == self._last
        if last and step % self._log_every == 0:
            self._progress.losses[step] = loss
        if done % self._every and done not in (self._steps, self._stop_at):
            return
        if not self._writer.has_room(stage, PATIENCE):
            self._progress.waits = True
            if not self._writer.has_room(stage, LONGEST_WRITE):
                raise self._too_slow()
        losses = self._losses(step, loss) if last else {}
        self._writer.write(Snapshot(stage, done, self._incarnation, self._stages[stage].snapshot(), losses))

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

    def _losses(self, step: int, loss: float | None) -> dict[int, float | None]:
        """Those that a run keeps, down to that of `step`, which may be its last; the same in every incarnation."""
        kept = self._progress.losses
        return {each: kept[each] for each in kept if each % self._log_every == 0} | {step: loss}

    def _too_slow(self) -> SnapshotFailed:
        return SnapshotFailed(f"after {LONGEST_WRITE:g} s, the disk is still busy with {self._writer.doing}")


def open_snapshots(
    job: Job,
    assigned: Assigned,
    executor: Executor,
    progress: Progress,
    hooks: Callable[..., SnapshotHooks] = SnapshotHooks,
) -> SnapshotHooks:
    """Restores the checkpoint that the worker begins at, and makes its `hooks`.

    Raises `SnapshotDamaged` and `ForeignState`.
    """
    checkpoints = _checkpoints(job.plan, assigned.run)
    restore(executor.stages, progress, checkpoints.load, assigned.step)
    return hooks(
        executor.stages,
        progress,
        SnapshotWriter(checkpoints, executor.stages, progress.durable),
        incarnation=assigned.incarnation,
        start=assigned.step,
        steps=job.steps,
        last=job.program.last,
        every=job.plan.recovery.snapshot_every,
        log_every=job.plan.run.log_every,
    )


def restore(
    stages: Mapping[int, Restorable], progress: Progress, load: Callable[[int, int], Snapshot], step: int
) -> None:
    """Sets the stages to their state after `step` steps; with 0 they have theirs."""
    for index, stage in stages.items() if step else ():
        snapshot = load(index, step)
        stage.restore(snapshot.state)
        progress.restored(snapshot.losses)


def _checkpoints(plan: Plan, run: str) -> SnapshotDirectory:
    return SnapshotDirectory(runs.folder(plan, run) / FOLDER, Origin(run, plan.digest()))
