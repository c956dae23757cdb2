"""Writes the metrics of a run beside its training: the compute loop hands lines over, a thread writes them.

compute loop  --add-->  lines that wait  --about every second, and before each snapshot of the last stage-->  file

A worker that begins at the checkpoint C replaces the file by a copy of its lines up to there. None of them is missing,
since a snapshot is written only after them; and what a predecessor may still write goes to the file that was replaced.
So the file has one line for each step, whatever was killed.
"""

import os
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic, sleep

import structlog

from stageline.pipeline.errors import StagelineError
from stageline.pipeline.retry import Note, Retry, persist, reason_of
from stageline.workers.disk.atomic_file import keep_trying

from .metrics import METRICS, EvaluationMetrics, MetricsLine, encoded, keep_lines

EVERY = 1.0  # seconds between two writes

log = structlog.get_logger()


class MetricsNotWritten(StagelineError):
    """The metrics of a run cannot be written; the text names the file and the reason."""


class MetricsFile(AbstractContextManager["MetricsFile"]):
    """The metrics in a run's `folder`, for the worker of the last stage, which begins after `start` training steps.

    `note` gets what keeps them from being written. That is tried again for a minute, as a snapshot is; meanwhile the
    lines wait in memory. Raises `MetricsNotWritten`.
    """

    def __init__(self, folder: Path, start: int, note: Note = lambda fault: None) -> None:
        self._note = note
        path = folder / METRICS
        self._what = f"write {path}"
        self._retry = Retry(self._what)
        self._failure: OSError | None = None
        self._added: deque[MetricsLine] = deque()
        self._unwritten: list[bytes] = []
        self._writing = Lock()
        try:
            self._evaluated = keep_trying(partial(keep_lines, path, start, path), path)
            self._file = path.open("r+b", buffering=0)
        except OSError as error:
            raise self._not_written(error) from error
        self._end = self._file.seek(0, os.SEEK_END)
        self._closing = Event()
        self._thread = Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what still waits in one attempt, for which this waits a second at most."""
        self._closing.set()
        self._thread.join(EVERY)
        if not self._thread.is_alive():
            self._file.close()

    def add(self, line: MetricsLine) -> None:
        """Hand a line over, and return at once. An evaluation that the file has is left out: a worker that begins
        after so many steps may evaluate again. Raises `MetricsNotWritten` once lines could not be written for a
        minute."""
        if self._failure is not None:
            raise self._not_written(self._failure) from self._failure
        if isinstance(line, EvaluationMetrics):
            if line.step <= self._evaluated:
                return
            self._evaluated = line.step
        self._added.append(line)

    def flush(self) -> None:
        """When this returns, all lines that were added survive a power failure. For any thread. May be repeated after
        it has raised `OSError`."""
        with self._writing:
            while self._added:
                self._unwritten.append(encoded(self._added.popleft()))
            if self._unwritten:
                text = b"".join(self._unwritten)
                self._write(text)
                self._end += len(text)
                self._unwritten.clear()

    def finish(self, wait: Callable[[float], object] = sleep) -> None:
        """`flush`, tried again for a minute after a fault that may pass; `wait` waits for so many seconds."""
        try:
            persist(self.flush, self._what, self._note, now=monotonic, wait=wait)
        except OSError as error:
            raise self._not_written(error) from error

    def _serve(self) -> None:
        pause: float | None = EVERY
        while pause is not None and not self._closing.wait(pause):
            pause = self._attempt()
        try:
            self.flush()
        except OSError as error:
            log.warning("metrics not written", reason=str(self._not_written(error)))

    def _attempt(self) -> float | None:
        """Write what waits; seconds until the next time, None if there should be none."""
        try:
            self.flush()
        except OSError as error:
            pause = self._retry.failed(error, monotonic())
            self._failure = error if pause is None else None
            self._note(None if pause is None else self._retry.fault)
            return pause
        if self._retry.fault is not None:
            self._retry = Retry(self._what)
            self._note(None)
        return EVERY

    def _write(self, text: bytes) -> None:
        """The file has no buffer, and may take a part at a time."""
        self._file.truncate(self._end)  # what an attempt that failed has written
        self._file.seek(self._end)
        left = memoryview(text)
        while left:
            left = left[self._file.write(left) :]
        os.fsync(self._file.fileno())

    def _not_written(self, error: OSError) -> MetricsNotWritten:
        return MetricsNotWritten(f"cannot {self._what}: {reason_of(error)}")
