"""Writes what stages take and give while the compute loop goes on: a thread, and a bounded backlog before it.

    compute loop  --keep(stage, way, message)-->  Recorder's thread  -->  recorded/stage-2/step-0000000100.3

A message is handed over with memory that nobody will write to. What cannot be written ends the recording, not the run.
"""

import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import structlog

from stageline.broker.codec.message import Message, encode
from stageline.broker.errors import Unsendable
from stageline.pipeline.plan import Plan
from stageline.pipeline.tree import tensors
from stageline.workers.runs import folder as runs

from .directory import RecordDirectory
from .record_file import Direction, write_entry

BACKLOG = 256 * 2**20  # bytes that wait while others are written; then the compute loop waits too

log = structlog.get_logger()

_Item = tuple[int, Direction, Message]


class RecordWriter:
    """The only writer under `incarnation` of the records of `stages`, from step `start` on, until it is closed."""

    def __init__(self, plan: Plan, run: str, stages: Iterable[int], incarnation: int, start: int) -> None:
        self._plan = plan
        self._run_id = run
        self._records = {stage: RecordDirectory(runs.folder(plan, run), stage) for stage in stages}
        self._incarnation = incarnation
        self._start = start
        self._every = plan.recovery.snapshot_every  # a file holds the steps between two snapshots
        self._files: dict[Path, BinaryIO] = {}
        self._changed = threading.Condition()
        self._waiting: deque[_Item] = deque()
        self._bytes = 0
        self._complete = self._forgotten = 0
        self._closing = self._over = False
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def keep(self, stage: int, way: Direction, message: Message) -> None:
        """Hands a message over; returns at once unless the disk is far behind."""
        size = sum(tensor.nbytes for tensor in tensors(message.payload)) if way is Direction.TAKEN else 0
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._bytes <= BACKLOG)
            if self._over:
                return
            self._waiting.append((stage, way, message))
            self._bytes += size
            self._changed.notify_all()

    def forget(self, complete: int) -> None:
        """What was recorded of the steps before `complete` is not wanted any more. Returns at once."""
        with self._changed:
            self._complete = max(self._complete, complete)
            self._changed.notify_all()

    def close(self, timeout: float | None = None) -> None:
        """Ends the thread when all that was handed over is written, or `timeout` seconds are over."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            for records in self._records.values():
                records.describe(self._run_id, self._plan)
            while self._turn():
                continue
        except (OSError, Unsendable) as error:
            log.warning("recording ends", reason=str(error))
        finally:
            with self._changed:
                self._over = True
                self._waiting.clear()
                self._changed.notify_all()
            for file in self._files.values():
                with suppress(OSError):  # a full disk was told of
                    file.close()

    def _turn(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing or self._complete > self._forgotten)
            complete = self._complete
            items, self._waiting, self._bytes = self._waiting, deque(), 0
            self._changed.notify_all()
        for item in items:
            self._write(*item)
        if complete > self._forgotten:
            self._delete_before(complete)
        return bool(items) or not self._closing

    def _write(self, stage: int, way: Direction, message: Message) -> None:
        frames = encode(message)
        write_entry(self._file(stage, message.step), way, frames if way is Direction.TAKEN else frames[:1])

    def _file(self, stage: int, step: int) -> BinaryIO:
        path = self._records[stage].segment(max(self._start, step - step % self._every), self._incarnation)
        if path not in self._files:
            self._files[path] = path.open("wb")
        return self._files[path]

    def _delete_before(self, complete: int) -> None:
        for stage, records in self._records.items():
            for begin, path in records.segments():
                if (begin // self._every + 1) * self._every <= complete:
                    self._close(stage, path)
                    path.unlink(missing_ok=True)
        self._forgotten = complete

    def _close(self, stage: int, path: Path) -> None:
        if path in self._files:
            self._files.pop(path).close()
