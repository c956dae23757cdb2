"""Snapshots that a worker takes between steps so that it can be replaced, and the start of its replacement.

every `snapshot_every` steps   a copy of each stage's state -> writing thread -> disk -> reported as durable
checkpoint C is announced      snapshots older than the complete checkpoint before C are deleted
a replacement                  restores the state of C, rewinds its queues to C, and runs the program from C on

The compute loop goes on while a snapshot is written; before the next one of the same stage it waits for that, so that
memory holds one copy of a stage at most. Where memory has a limit, it waits at once. No snapshot is ever dropped: a
checkpoint that one stage leaves out never becomes complete. A snapshot that cannot be written for a while, as on a full
disk, is late, and so is its checkpoint: nothing is trimmed before.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from threading import Event
from time import monotonic

from stageline.broker.control.messages import Assigned
from stageline.pipeline.errors import ForeignState
from stageline.pipeline.retry import persist, reason_of
from stageline.pipeline.stage.layers.memory import empty
from stageline.pipeline.stage.stage import Stage
from stageline.workers.disk.background_writer import LONGEST_WRITE, BackgroundWriter
from stageline.workers.runtime.calls import Position
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.loop import PATIENCE
from stageline.workers.runtime.progress import Progress
from stageline.workers.runtime.worker_feature import SNAPSHOTS, WorkerFeature, WorkerPlace, awaited, in_turns

from .directory import SnapshotDirectory, SnapshotFailed, beginning_of
from .inventory import checkpoints_of
from .snapshot import Snapshot, SnapshotDamaged

Announced = tuple[int, int | None]  # the step of a complete checkpoint, and of the best one


class CheckpointHooks(AbstractContextManager["CheckpointHooks"]):
    """Hooks that a worker calls between steps so that another can replace it; this base class does nothing.

    `start` is the position of the checkpoint that was restored; None if there is none.
    """

    start: Position | None = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End the writing. After an error, snapshots that wait to be written are dropped."""

    def stepped(self, stage: int, step: int, loss: float | None) -> None:
        """Handle the end of `step` of `stage`; `loss` is the last stage's. Raises `SnapshotFailed`."""

    def forget(self, complete: int, best: int | None = None) -> None:
        """Handle the announcement of the checkpoint of step `complete`: older ones but `best` may be deleted."""

    def may_be_complete(self, step: int) -> bool:
        """Return False if the checkpoint of `step` cannot be complete: this worker has no snapshot as new as that."""
        return True

    def flush(self) -> None:
        """Wait until all snapshots are on the disk. Raises `SnapshotFailed`."""

    def stop_at(self, step: int) -> None:
        """Make a snapshot due after `step`, with whose checkpoint the run is to stop. Raises `SnapshotFailed`."""

    def keep(self, step: int) -> None:
        """Take a snapshot of the state after `step` steps, which is about to change or be lost.

        Raises `SnapshotFailed`.
        """


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Steps at which snapshots are due, and steps whose losses they hold.

    Args:
        steps: Number of steps of the run; after the last, a snapshot is due.
        every: Number of steps between two snapshots.
        log_every: Number of steps between two losses that are kept.
        due: Returns True for other steps after which a snapshot is due.
    """

    steps: int
    every: int
    log_every: int
    due: Callable[[int], bool] = lambda step: False


class SnapshotHooks(CheckpointHooks):
    """Recovery by snapshots of one worker's `stages`, whose state is that of the checkpoint at `start`."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        progress: Progress,
        snapshots: SnapshotDirectory,
        writer: BackgroundWriter,
        rhythm: Rhythm,
        *,
        incarnation: int,
        start: Position,
        features: Sequence[WorkerFeature] = (),
        waits_for: Collection[int] = (),
        announced: Callable[[], Iterable[Announced]] = tuple,
    ) -> None:
        """Queue the deletion of old drafts.

        Args:
            stages: Stages of the worker.
            progress: Is told of all that is on the disk.
            snapshots: Folder; nothing else may write the snapshots of `stages`.
            writer: Writes there; its limit is 1. Jobs that it was given before a snapshot are on the disk before it.
            rhythm: Steps at which snapshots are due.
            incarnation: Incarnation of the worker.
            start: Position of the checkpoint that was restored.
            features: Settled before each snapshot is written; they forget records from before older ones.
            waits_for: Stages whose snapshots the compute loop waits for: memory has no room for their copies beside
                another step.
            announced: Returns announced checkpoints that `forget` has yet to be called for. Called during waits for the
                disk, which may need the room of older snapshots.
        """
        self._stages = stages
        self._progress = progress
        self._snapshots = snapshots
        self._writer = writer
        self._rhythm = rhythm
        self._incarnation = incarnation
        self.start = start
        self._newest = start.step  # the newest complete checkpoint that was announced
        self._taken = dict.fromkeys(stages, start.step)  # of which step each stage's newest snapshot is
        self._written = dict.fromkeys(stages, start.step)  # likewise, of those on the disk; set by the writing thread
        self._loss: float | None = None  # of the newest step; on the last stage
        self._stop_at: int | None = None
        self._features = features
        self._waits_for = waits_for
        self._announced = announced
        for stage in stages:
            writer.submit(partial(snapshots.delete_drafts, stage), what=f"look into {snapshots.folder}")

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End the writing; wait for it unless there was an error."""
        self._writer.close(0.0 if error else PATIENCE)

    def stepped(self, stage: int, step: int, loss: float | None) -> None:
        """Keep the loss, and take a snapshot of `stage` if one is due."""
        done, rhythm = step + 1, self._rhythm
        if stage == self._progress.last:
            self._loss = loss
            if step % rhythm.log_every == 0:
                self._progress.keep_loss(step, loss)
        if not done % rhythm.every or done in (rhythm.steps, self._stop_at) or rhythm.due(done):
            self._take(stage, done)

    def stop_at(self, step: int) -> None:
        """Make a snapshot due after `step`."""
        self._stop_at = step
        self.keep(step)

    def keep(self, step: int) -> None:
        """Take snapshots of the stages that are at `step` and have no newer one."""
        for stage, taken in self._taken.items():
            if taken < step and self._progress.is_after(step, stage):
                self._take(stage, step)

    def _take(self, stage: int, done: int) -> None:
        """Copy the state of `stage`, which has finished `done` steps; it is written in the background."""
        self._wait_for(stage)
        self._taken[stage] = done
        # The loss of the last step, which may be the run's last, is kept too. The same losses in every incarnation.
        losses = self._progress.losses
        kept = {each: losses[each] for each in losses if each % self._rhythm.log_every == 0} | {done - 1: self._loss}
        state, position = self._stages[stage].snapshot(), self._progress.position(done)
        snapshot = Snapshot(
            stage,
            done,
            self._incarnation,
            state,
            kept if stage == self._progress.last else {},
            position.calls,
            position.evaluations,
            tuple(each for each in self._progress.evaluations if each.step < done)
            if stage == self._progress.last
            else (),
        )
        what = f"write its snapshot of step {done} to {self._snapshots.path(stage, done)}"
        self._writer.submit(partial(self._write, snapshot), stage, 1, what=what)
        if stage in self._waits_for:
            del snapshot, state
            self._wait_for(stage)

    def _wait_for(self, stage: int) -> None:
        forget = self._forget_announced
        done = awaited(partial(self._writer.is_done, stage), self._progress, "a snapshot is", LONGEST_WRITE, forget)
        self._writer.demand(done, LONGEST_WRITE, SnapshotFailed)

    def _forget_announced(self) -> None:
        """Delete old snapshots while the compute loop, which obeys the broker, waits for a disk that they may fill."""
        for complete, best in self._announced():
            self.forget(complete, best)

    def forget(self, complete: int, best: int | None = None) -> None:
        """Queue the deletion of snapshots from before the complete checkpoint that precedes `complete`, but for `best`.

        A run can be resumed from that one if `complete` is damaged. Newer snapshots stay, and all if `complete` cannot
        be.
        """
        if complete > self._newest and self.may_be_complete(complete):
            for stage in self._stages:  # before the snapshots that wait: it makes space on the disk
                delete = partial(self._snapshots.delete_before, stage, self._newest, best)
                what = f"delete snapshots of stage {stage} before step {self._newest} in {self._snapshots.folder}"
                self._writer.submit(delete, first=True, what=what)
            for feature in self._features:
                feature.forget(self._newest)
            self._newest = complete

    def may_be_complete(self, step: int) -> bool:
        """Return True if each stage has a snapshot of `step`, from any incarnation, or a newer one.

        Another incarnation's snapshot counts if the broker asked what is on the disks.
        """
        return all(step <= written or self._is_there(stage, step) for stage, written in list(self._written.items()))

    def _is_there(self, stage: int, step: int) -> bool:
        try:
            return step in self._snapshots.steps(stage)
        except OSError:
            return False

    def flush(self) -> None:
        """Wait until all snapshots are on the disk. Raises `SnapshotFailed`.

        Announced older ones are deleted during the wait.
        """
        done = in_turns(self._writer.flush, LONGEST_WRITE, self._forget_announced)
        self._writer.demand(done, LONGEST_WRITE, SnapshotFailed)

    def _write(self, snapshot: Snapshot) -> None:
        try:
            for feature in self._features:
                feature.settle(snapshot.stage)
        except OSError as error:
            raise SnapshotFailed(
                f"stage {snapshot.stage} could not write its snapshot of step {snapshot.step}, since what comes before "
                f"it is not on the disk: {error}. Older snapshots are untouched; repair this and resume the run"
            ) from error
        self._snapshots.write(snapshot)
        self._written[snapshot.stage] = snapshot.step
        self._progress.durable(snapshot.stage, snapshot.step)


def open_snapshots(
    place: WorkerPlace,
    assigned: Assigned,
    features: Sequence[WorkerFeature] = (),
    announced: Callable[[], Iterable[Announced]] = tuple,
) -> CheckpointHooks:
    """Restore the checkpoint that the worker at `place` begins at, and return its hooks.

    The hooks do nothing in a run without recovery.

    Args:
        place: Place of the worker; its writer writes the snapshots.
        assigned: Place as the broker has assigned it.
        features: Features, as in `SnapshotHooks`.
        announced: Returns announced checkpoints, as in `SnapshotHooks`.

    Raises:
        SnapshotDamaged, ForeignState: The checkpoint cannot be restored.
    """
    job, executor, progress = place.job, place.executor, place.progress
    if not job.plan.recovery.on:
        return CheckpointHooks()
    checkpoints = checkpoints_of(job.plan, assigned.run)

    def load(stage: int, step: int) -> Snapshot:
        found = beginning_of(stage, step, job.schedule, checkpoints)
        path, memory = checkpoints.path(found, step), executor.stages[stage].file_memory
        try:
            return persist(
                partial(checkpoints.load, found, step, empty if memory is None else memory.empty),
                f"read its snapshot {path}",
                progress.noting(SNAPSHOTS),
                now=monotonic,
                wait=Event().wait,
            )
        except OSError as error:
            raise SnapshotDamaged(path, [f"it could not be read for a minute: {reason_of(error)}"]) from error

    due = job.rounds.due if job.plan.keeps_best else (lambda step: False)
    return SnapshotHooks(
        executor.stages,
        progress,
        checkpoints,
        place.writer,
        Rhythm(job.steps, job.plan.recovery.snapshot_every, job.plan.run.log_every, due),
        incarnation=assigned.incarnation,
        start=restore(executor.stages, progress, load, assigned.step),
        features=features,
        waits_for=_without_room(job, assigned.index, executor.stages),
        announced=announced,
    )


def missing_snapshots(job: Job, assigned: Assigned, checkpoints: SnapshotDirectory) -> list[tuple[int, int]]:
    """Return (stage, step) of each snapshot that a worker begins with, and that is not here, or is damaged.

    Args:
        job: The run's job; none is missing if its snapshots are not copied.
        assigned: Place of the worker.
        checkpoints: Snapshots here.
    """
    step = assigned.step
    if not (job.neighbours and step):
        return []
    needed = {
        stage: beginning_of(stage, step, job.schedule, checkpoints) for stage in job.schedule.placement[assigned.index]
    }
    return [(stage, step) for stage, found in needed.items() if checkpoints.verify(found, step)]


def restore(
    stages: Mapping[int, Stage], progress: Progress, load: Callable[[int, int], Snapshot], step: int
) -> Position:
    """Set the stages to their state after `step` steps, and return their position; with 0 they keep theirs.

    Args:
        stages: Stages of the worker.
        progress: Gets the losses and rounds of the snapshots.
        load: Returns the snapshot of (stage, step).
        step: Number of steps done.

    Raises:
        ForeignState: The stages' snapshots disagree about the position.
    """
    position = Position(step)
    for place, (index, stage) in enumerate(stages.items() if step else ()):
        snapshot = load(index, step)
        if place and snapshot.position != position:
            raise ForeignState(f"stage {index} was at {snapshot.position} after {step} steps, another at {position}")
        stage.restore(snapshot.state)
        progress.restored(snapshot.losses, snapshot.rounds)
        position = snapshot.position
    return position


def _without_room(job: Job, worker: int, stages: Mapping[int, Stage]) -> list[int]:
    """Return the stages whose copies are in memory, if the worker's memory limit is tight; else none."""
    tight = job.plan.is_tight(worker)
    return [index for index, stage in stages.items() if tight and stage.file_memory is None]
