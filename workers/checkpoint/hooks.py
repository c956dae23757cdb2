"""What a worker does between steps so that it can be replaced, and how a replacement begins.

every `snapshot_every` steps   a copy of each stage's state -> writing thread -> disk -> reported as durable
checkpoint C is announced      snapshots older than the complete checkpoint before C are deleted
a replacement                  restores the state of C, rewinds its queues to C, and runs the program from C on

The compute loop goes on while one snapshot is written, and one of each stage may wait. No snapshot is ever dropped: a
checkpoint that one stage leaves out never becomes complete. Beyond that, the compute loop waits.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial

from stageline.broker.control.protocol import Assigned, Inspection
from stageline.broker.recovery.checkpoint_tracker import is_gone
from stageline.pipeline.plan import Plan
from stageline.pipeline.stage.stage import Stage
from stageline.workers.disk.background_writer import BackgroundWriter
from stageline.workers.runs import folder as runs
from stageline.workers.runtime.executor import Executor
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.loop import PATIENCE
from stageline.workers.runtime.progress import Progress

from .directory import FOLDER, SnapshotDirectory, SnapshotFailed
from .snapshot import Origin, Snapshot, SnapshotDamaged

LONGEST_WRITE = 120.0  # seconds that the compute loop waits for the disk before the run fails


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
        stages = self._plan.workers[assigned.index].stages
        return not is_gone(assigned.step, stages, self.snapshots(assigned.run) or [])

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


class SnapshotWriter:
    """The only writer of the snapshots of `stages`, on a thread of its own, until it is closed.

    `durable(stage, step)` is called for each snapshot that is on disk and was read back from there. It is called from
    the writing thread and must not wait.
    """

    def __init__(
        self, snapshots: SnapshotDirectory, stages: Iterable[int], durable: Callable[[int, int], None]
    ) -> None:
        self.doing = "nothing"  # what the thread does, for people
        self._snapshots = snapshots
        self._stages = tuple(stages)
        self._durable = durable
        self._writer = BackgroundWriter("snapshots", limit=1)
        for stage in self._stages:
            self._writer.submit(partial(snapshots.delete_drafts, stage))

    def has_room(self, stage: int, timeout: float = 0.0) -> bool:
        """Whether a snapshot of `stage` can be handed over without waiting; waits for that up to `timeout` seconds.

        Raises the `SnapshotFailed` that ended the writing.
        """
        room = self._writer.has_room(stage, timeout)
        self._require_health()
        return room

    def write(self, snapshot: Snapshot) -> None:
        """Hands a snapshot over. Waits for room; raises the `SnapshotFailed` that ended the writing."""
        self._writer.submit(partial(self._write, snapshot), snapshot.stage, 1)
        self._require_health()

    def delete_before(self, complete: int) -> None:
        """Deletes snapshots from before step `complete`, an announced checkpoint. Returns at once.

        This goes before the snapshots that wait: it makes space on the disk.
        """
        for stage in self._stages:
            self._writer.submit(partial(self._snapshots.delete_before, stage, complete), first=True)

    def flush(self, timeout: float | None = None) -> bool:
        """Whether everything handed over is on disk; waits for that up to `timeout` seconds.

        Raises the `SnapshotFailed` that prevents it.
        """
        done = self._writer.flush(timeout)
        self._require_health()
        return done

    def close(self, timeout: float | None = None) -> None:
        """Ends the thread, once everything handed over is on disk, or failed, or after `timeout` seconds."""
        self._writer.close(timeout)

    def _require_health(self) -> None:
        match self._writer.failure:
            case None:
                return
            case SnapshotFailed() as error:
                raise error
            case bug:
                raise SnapshotFailed(
                    f"a bug in stageline while it wrote snapshots: {type(bug).__name__}: {bug}"
                ) from bug

    def _write(self, snapshot: Snapshot) -> None:
        path = self._snapshots.path(snapshot.stage, snapshot.step)
        self.doing = f"writing the snapshot of step {snapshot.step} to {path}"
        self._snapshots.write(snapshot)
        self._durable(snapshot.stage, snapshot.step)
        self.doing = "nothing"


class SnapshotHooks(CheckpointHooks):
    """Recovery by snapshots of one worker's `stages`, whose state is that of checkpoint `start`.

    A snapshot is written every `every` steps and after the last of `steps`; on stage `last` it holds the losses of
    every `log_every`-th step. `forgotten(step)` is called when those of steps before `step` are deleted.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        progress: Progress,
        writer: SnapshotWriter,
        *,
        incarnation: int,
        start: int,
        steps: int,
        last: int,
        every: int,
        log_every: int,
        forgotten: Callable[[int], None] = lambda step: None,
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
        self._forgotten = forgotten
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
            self._writer.delete_before(self._newest)
            self._forgotten(self._newest)
            self._newest = complete

    def stop_at(self, step: int) -> None:
        self._stop_at = step

    def flush(self) -> None:
        if not self._writer.flush(LONGEST_WRITE):
            raise self._too_slow()

    def _losses(self, step: int, loss: float | None) -> dict[int, float | None]:
        """The losses of every `log_every`-th step, and that of `step`, which may be the run's last; the same in every
        incarnation."""
        kept = self._progress.losses
        return {each: kept[each] for each in kept if each % self._log_every == 0} | {step: loss}

    def _too_slow(self) -> SnapshotFailed:
        return SnapshotFailed(f"after {LONGEST_WRITE:g} s, the disk is still busy with {self._writer.doing}")


def open_snapshots(
    job: Job,
    assigned: Assigned,
    executor: Executor,
    progress: Progress,
    forgotten: Callable[[int], None] = lambda step: None,
) -> SnapshotHooks:
    """Restores the checkpoint that the worker begins at, and makes its hooks; `forgotten` as they take it.

    Raises `SnapshotDamaged` and `ForeignState`.
    """
    checkpoints = _checkpoints(job.plan, assigned.run)
    restore(executor.stages, progress, checkpoints.load, assigned.step)
    return SnapshotHooks(
        executor.stages,
        progress,
        SnapshotWriter(checkpoints, executor.stages, progress.durable),
        incarnation=assigned.incarnation,
        start=assigned.step,
        steps=job.steps,
        last=job.program.last,
        every=job.plan.recovery.snapshot_every,
        log_every=job.plan.run.log_every,
        forgotten=forgotten,
    )


def restore(stages: Mapping[int, Stage], progress: Progress, load: Callable[[int, int], Snapshot], step: int) -> None:
    """Sets the stages to their state after `step` steps; with 0 they have theirs."""
    for index, stage in stages.items() if step else ():
        snapshot = load(index, step)
        stage.restore(snapshot.state)
        progress.restored(snapshot.losses)


def _checkpoints(plan: Plan, run: str) -> SnapshotDirectory:
    return SnapshotDirectory(runs.folder(plan, run) / FOLDER, Origin(run, plan.digest()))
