"""Writes snapshots while the compute loop goes on: a thread, and room for one more snapshot of each stage behind the
one being written.

    compute loop  --keep(snapshot)-->  Keeper's thread  --place-->  disk,  then  durable(stage, step)
    broker's word --forget(C)------->                   --forget->  disk

None is ever dropped: a checkpoint that one stage leaves out never becomes complete. The compute loop waits for room.
"""

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from .directory import SnapshotDirectory, SnapshotFailed
from .snapshot import Snapshot


class NoRoom(Exception):
    """A snapshot was handed over while one of the same stage still waits to be written."""


class SnapshotWriter:
    """The only writer of the snapshots of `stages`, until it is closed.

    `durable(stage, step)` is called for each snapshot that is on disk and was read back from there; `failed(error)` at
    most once, after which nothing more is written. Both come from the keeper's thread and must not wait.
    """

    def __init__(
        self,
        checkpoints: SnapshotDirectory,
        stages: Iterable[int],
        durable: Callable[[int, int], None],
        failed: Callable[[SnapshotFailed], None] = lambda error: None,
    ) -> None:
        self._checkpoints = checkpoints
        self._stages = tuple(stages)
        self._durable = durable
        self._failed = failed
        self._changed = threading.Condition()
        self._waiting: dict[int, Snapshot] = {}  # by stage, in the order in which they came
        self._writing: Snapshot | None = None
        self._complete = self._forgotten = 0
        self._failure: SnapshotFailed | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(0.0 if error else None)

    @property
    def doing(self) -> str:
        """What the thread is at, in words: what a compute loop that waits for room waits for."""
        with self._changed:
            if self._writing is None:
                return "nothing"
            path = self._checkpoints.path(self._writing.stage, self._writing.step)
            return f"writing the snapshot of step {self._writing.step} to {path}"

    def room(self, stage: int, timeout: float = 0.0) -> bool:
        """Whether a snapshot of `stage` can be handed over now; waits for that up to `timeout` seconds.

        Raises the `SnapshotFailed` that ended the writing.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or stage not in self._waiting, timeout)
            self._demand_health()
            return stage not in self._waiting

    def keep(self, snapshot: Snapshot) -> None:
        """Hands a snapshot over; returns at once. Raises `NoRoom`, and the `SnapshotFailed` that ended the writing."""
        with self._changed:
            self._demand_health()
            if snapshot.stage in self._waiting:
                raise NoRoom(f"stage {snapshot.stage} hands over step {snapshot.step} before there is room for it")
            self._waiting[snapshot.stage] = snapshot
            self._changed.notify_all()

    def forget(self, complete: int) -> None:
        """The checkpoint of step `complete` is announced: snapshots from before it may be deleted. Returns at once."""
        with self._changed:
            self._complete = max(self._complete, complete)
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Whether all that was handed over is on disk; waits for that. Raises the `SnapshotFailed` that prevents it."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._idle, timeout)
            self._demand_health()
            return self._idle

    def close(self, timeout: float | None = None) -> None:
        """Ends the thread, once all that was handed over is on disk, or failed, or `timeout` seconds are over."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._idle, timeout)
            self._closing = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(timeout)

    @property
    def _idle(self) -> bool:
        return not self._waiting and self._writing is None and self._forgotten >= self._complete

    def _demand_health(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            for stage in self._stages:
                self._checkpoints.tidy(stage)
            while self._turn():
                continue
        except SnapshotFailed as error:
            self._fail(error)
        except Exception as bug:  # noqa: BLE001  # handed to the owner: a thread must not end in silence
            self._fail(SnapshotFailed(f"a bug in stageline while it wrote snapshots: {type(bug).__name__}: {bug}"))

    def _turn(self) -> bool:
        """Does one thing; False if there is nothing more to do. Deleting comes first: it makes space."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or not self._idle)
            complete = self._complete
            self._writing = snapshot = self._next() if complete == self._forgotten else None
        if complete > self._forgotten:
            self._forget(complete)
        elif snapshot is not None:
            self._write(snapshot)
        return snapshot is not None or not self._closing

    def _next(self) -> Snapshot | None:
        stage = next(iter(self._waiting), None)
        if stage is None:
            return None
        self._changed.notify_all()  # there is room again
        return self._waiting.pop(stage)

    def _forget(self, complete: int) -> None:
        for stage in self._stages:
            self._checkpoints.forget(stage, complete)
        with self._changed:
            self._forgotten = complete
            self._changed.notify_all()

    def _write(self, snapshot: Snapshot) -> None:
        self._checkpoints.place(snapshot)
        self._durable(snapshot.stage, snapshot.step)
        with self._changed:
            self._writing = None
            self._changed.notify_all()

    def _fail(self, error: SnapshotFailed) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        self._failed(error)
