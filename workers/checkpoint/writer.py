"""Writes snapshots while the compute loop goes on: one is written, and one of each stage may wait.

    compute loop        --write(snapshot)-->    thread  -->  disk, then durable(stage, step)
    broker announces C  --delete_before(C)-->   thread  -->  disk

No snapshot is ever dropped: a checkpoint that one stage leaves out never becomes complete. The compute loop waits.
"""

from collections.abc import Callable, Iterable
from functools import partial

from stageline.workers.disk.background_writer import BackgroundWriter

from .directory import SnapshotDirectory, SnapshotFailed
from .snapshot import Snapshot


class SnapshotWriter:
    """The only writer of the snapshots of `stages`, until it is closed.

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
                text = f"a bug in stageline while it wrote snapshots: {type(bug).__name__}: {bug}"
                raise SnapshotFailed(text) from bug

    def _write(self, snapshot: Snapshot) -> None:
        path = self._snapshots.path(snapshot.stage, snapshot.step)
        self.doing = f"writing the snapshot of step {snapshot.step} to {path}"
        self._snapshots.write(snapshot)
        self._durable(snapshot.stage, snapshot.step)
        self.doing = "nothing"
