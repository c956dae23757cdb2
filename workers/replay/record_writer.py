"""Writes what stages take and give while the compute loop goes on, to one file for the steps between two snapshots.

    compute loop  --record(stage, direction, message)-->  thread  -->  recorded/stage-2/step-0000000100.3

Tensors that are handed over must not be written to any more. A record that cannot be written ends the recording, not
the run.
"""

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import structlog

from stageline.broker.codec.message import Message, encode
from stageline.pipeline.plan import Plan
from stageline.pipeline.tree import tensors
from stageline.workers.disk.background_writer import BackgroundWriter
from stageline.workers.runs import folder as runs

from .directory import RecordDirectory
from .record_file import Direction, write_entry

BACKLOG = 256 * 2**20  # bytes that may wait to be written; then the compute loop waits too

log = structlog.get_logger()


class RecordWriter:
    """The only writer under `incarnation` of the records of `stages`, from step `start` on, until it is closed."""

    def __init__(self, plan: Plan, run: str, stages: Iterable[int], incarnation: int, start: int) -> None:
        self._plan = plan
        self._run = run
        self._records = {stage: RecordDirectory(runs.folder(plan, run), stage) for stage in stages}
        self._incarnation = incarnation
        self._start = start
        self._every = plan.recovery.snapshot_every  # a file holds the steps between two snapshots
        self._files: dict[Path, BinaryIO] = {}
        self._writer = BackgroundWriter("recorder", BACKLOG, self._fail)
        self._writer.submit(self._describe)

    def record(self, stage: int, direction: Direction, message: Message) -> None:
        """Hands a message over; returns at once unless the disk is far behind."""
        size = sum(tensor.nbytes for tensor in tensors(message.payload)) if direction is Direction.TAKEN else 0
        self._writer.submit(partial(self._write, stage, direction, message), size=size)

    def delete_before(self, complete: int) -> None:
        """Deletes the records of steps before `complete`. Returns at once."""
        self._writer.submit(partial(self._delete_before, complete))

    def close(self, timeout: float | None = None) -> None:
        """Waits until everything handed over is written, up to `timeout` seconds; the thread goes on after that."""
        self._writer.submit(self._close_files)
        self._writer.close(timeout, drop=False)

    def _describe(self) -> None:
        for records in self._records.values():
            records.describe(self._run, self._plan)

    def _write(self, stage: int, direction: Direction, message: Message) -> None:
        frames = encode(message)
        begin = max(self._start, message.step - message.step % self._every)
        path = self._records[stage].segment(begin, self._incarnation)
        if path not in self._files:
            self._files[path] = path.open("wb")
        write_entry(self._files[path], direction, frames if direction is Direction.TAKEN else frames[:1])

    def _delete_before(self, complete: int) -> None:
        for records in self._records.values():
            for begin, path in records.segments():
                if (begin // self._every + 1) * self._every <= complete:
                    if (file := self._files.pop(path, None)) is not None:
                        file.close()
                    path.unlink(missing_ok=True)

    def _fail(self, error: Exception) -> None:
        log.warning("recording ends", reason=str(error))
        self._close_files()

    def _close_files(self) -> None:
        while self._files:
            with suppress(OSError):  # a full disk was reported when it was written to
                self._files.popitem()[1].close()
