"""Measurements of a run, in its folder: a line of JSON for each training step, and for each evaluation.

metrics.jsonl        {"kind":"step","step":0,"loss":2.31,"learning_rates":[0.1],"rows":32,"time":1795415517.2}
                     {"kind":"step","step":1,"loss":2.29,"learning_rates":[0.1],"rows":32,"time":1795415517.3}
                     {"kind":"evaluation","step":2,"loss":2.4,"metrics":{"accuracy":0.31},"time":1795415517.5}
evaluations.jsonl    the same, of the evaluations that a script has called for; written by the script

`step` of a training step counts from 0; of an evaluation, it is how many steps were trained before. So the lines after
C steps are those of steps before C, and of evaluations up to C. A writer that was killed may leave half a line.

`MetricsTail` reads them while the run goes on; `EventFile` hands them to TensorBoard. `MetricsFile` writes them:

compute loop  --add-->  lines that wait  --about every second, and before each snapshot of the last stage-->  file

A worker that begins at the checkpoint C replaces the file by a copy of its lines up to there. None of them is missing,
since a snapshot is written only after them; and later lines of a predecessor go to the file that was replaced. So the
file has one line for each step, whatever was killed.
"""

import heapq
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from math import isfinite
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import BinaryIO, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from stageline.pipeline.errors import StagelineError
from stageline.pipeline.retry import Note, Retry, persist, reason_of
from stageline.workers.disk.atomic_file import draft_of, keep_trying, make_folder, publish, sync

from .trackers import Sink

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"

Value = float | Literal["nan", "inf", "-inf"] | None  # a text where JSON has no number; None where there were no rows


EVERY = 1.0  # seconds between two writes


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """Line of a training step.

    `loss` is None without rows; `gradient_norm` exists where gradients are clipped; `learning_rates` are those of the
    last stage's groups; `time` is the step's end, in seconds since the epoch.
    """

    step: int
    loss: float | None
    gradient_norm: float | UnsetType = UNSET
    learning_rates: tuple[float, ...] = ()
    rows: int = 0
    time: float
    metrics: ClassVar[Mapping[str, Value]] = {}
    newest_round: ClassVar[int] = -1  # none

    def add_to(self, sink: Sink) -> None:
        """Hand the line to another program."""
        norm = None if self.gradient_norm is UNSET else self.gradient_norm
        sink.add_step(self.step, self.loss, norm, self.learning_rates, self.time)


class EvaluationMetrics(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    """Line of an evaluation after `step` training steps: means over its rows.

    `fit` is the number of the `Line.fit` call that it belongs to, counted from 1 in its script.
    """

    step: int
    loss: Value = None
    metrics: Mapping[str, Value] = {}
    time: float
    fit: int | UnsetType = UNSET
    learning_rates: ClassVar[tuple[float, ...]] = ()

    @property
    def newest_round(self) -> int:
        """Number of steps before the evaluation."""
        return self.step

    def add_to(self, sink: Sink) -> None:
        """Hand the line to another program."""
        sink.add_evaluation(self.step, self.values, self.time)

    @property
    def values(self) -> dict[str, float | None]:
        """Loss ("loss") and metrics by name."""
        found = {"loss": self.loss, **self.metrics}
        return {name: None if value is None else float(value) for name, value in found.items()}


MetricsLine = StepMetrics | EvaluationMetrics
_DECODER: msgspec.json.Decoder[MetricsLine] = msgspec.json.Decoder(MetricsLine)


def evaluation_line(step: int, values: Mapping[str, float | None], time: float, fit: int | None) -> EvaluationMetrics:
    """Return the line of an evaluation; `values` are by metric, with or without "loss"."""
    written = {name: _written(value) for name, value in values.items()}
    loss = written.pop("loss", None)
    return EvaluationMetrics(step=step, loss=loss, metrics=written, time=time, fit=UNSET if fit is None else fit)


def encoded(line: MetricsLine) -> bytes:
    """Return the line as bytes of the file, with its newline."""
    return msgspec.json.encode(line) + b"\n"


def decoded(text: bytes) -> MetricsLine | None:
    """Return the line; None if `text` is no whole line of a file of metrics."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return _DECODER.decode(text) if text.endswith(b"\n") else None
    return None


def lines_in(file: BinaryIO) -> Iterator[MetricsLine]:
    """Return the whole lines from the present position of `file`; others are left out."""
    return (line for line in map(decoded, file) if line is not None)


def metrics_in(folder: Path) -> Iterator[MetricsLine]:
    """Return all lines in the folder of a run, in the order of training. Raises `FileNotFoundError` if it has none."""
    files = [folder / name for name in (METRICS, EVALUATIONS) if (folder / name).exists()]
    if not files:
        raise FileNotFoundError(folder / METRICS)
    return heapq.merge(*map(_lines_of, files), key=place_of)


def place_of(line: MetricsLine) -> tuple[int, bool]:
    """Return a key that sorts lines in the order of training: an evaluation after 2 steps comes before step 2."""
    return line.step, isinstance(line, StepMetrics)


def keep_lines(source: Path, step: int, target: Path) -> int:
    """Replace `target` by the lines in `source` up to `step` training steps, in one instant for readers.

    Returns the newest step of an evaluation among them, -1 without one. Raises `OSError`; then nothing has changed.
    """
    newest = -1
    make_folder(target.parent)
    draft = draft_of(target)
    try:
        with draft.open("xb") as file:
            first_after = step, True  # the place of step `step`
            for line in (each for each in _lines_of(source) if place_of(each) < first_after):
                newest = max(newest, line.newest_round)
                file.write(encoded(line))
        sync(draft)
        publish(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return newest


def carry_lines(source: Path, step: int, target: Path, *names: str) -> None:
    """Copy the lines of the files `names` up to `step` from the folder `source` to the folder `target`.

    Missing files, and files that `target` has, are left. Raises `OSError`.
    """
    for name in names:
        if (source / name).exists() and not (target / name).exists():
            keep_lines(source / name, step, target / name)


def _lines_of(path: Path) -> Iterator[MetricsLine]:
    with suppress(FileNotFoundError), path.open("rb") as file:
        yield from lines_in(file)


def _written(value: float | None) -> Value:
    if value is None or isfinite(value):
        return value
    return "nan" if value != value else "inf" if value > 0 else "-inf"


class MetricsTail:
    """Reader of a run's metrics while it is under way."""

    def __init__(self, folder: Path) -> None:
        """Read the metrics in the run's `folder` from the beginning."""
        self._files = [_FileTail(folder / name) for name in (METRICS, EVALUATIONS)]

    def read(self) -> list[MetricsLine]:
        """Return the lines since the last call, in the order of training as far as they are there."""
        return list(heapq.merge(*(file.read() for file in self._files), key=place_of))


class _FileTail:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._offset = 0
        self._newest = self._known = (-1, False)  # what was read last; up to where a file that was replaced is known

    def read(self) -> list[MetricsLine]:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset, self._known = found.st_ino, 0, self._newest
                file.seek(self._offset)
                lines = [line for text in file if (line := self._next(text)) is not None]
        except FileNotFoundError:
            return []
        return lines

    def _next(self, text: bytes) -> MetricsLine | None:
        if not text.endswith(b"\n"):  # the rest is still to be written
            return None
        self._offset += len(text)
        line = decoded(text)
        if line is None or place_of(line) <= self._known:
            return None
        self._newest = place_of(line)
        return line


class MetricsNotWritten(StagelineError):
    """Error that the metrics of a run cannot be written.

    Mend: Make room on the disk or make the folder writable, and resume the run.

    Example: cannot write runs/a/metrics.jsonl: disk full
    """

    error_code = "SL506"


class MetricsFile(AbstractContextManager["MetricsFile"]):
    """Metrics in a run's folder, written by the worker of the last stage.

    A fault that keeps lines from being written is tried again for a minute, as for a snapshot; the lines wait in
    memory.
    """

    def __init__(self, folder: Path, start: int, note: Note = lambda fault: None) -> None:
        """Keep the lines up to `start` training steps and start the thread; `note` gets faults that may pass.

        Raises `MetricsNotWritten`.
        """
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
        """Write the waiting lines and close the file."""
        self.close()

    def close(self) -> None:
        """Write the waiting lines in one attempt, for at most a second, and close the file."""
        self._closing.set()
        self._thread.join(EVERY)
        if not self._thread.is_alive():
            self._file.close()

    def add(self, line: MetricsLine) -> None:
        """Hand a line over, and return at once. Raises `MetricsNotWritten` once writing has failed for a minute.

        An evaluation that the file has is left out: a worker that begins after its step may evaluate again.
        """
        self.demand_written()
        if 0 <= line.newest_round <= self._evaluated:
            return
        self._evaluated = max(self._evaluated, line.newest_round)
        self._added.append(line)

    def demand_written(self) -> None:
        """Raise `MetricsNotWritten` once writing has failed for a minute."""
        if self._failure is not None:
            raise self._not_written(self._failure) from self._failure

    def flush(self) -> None:
        """Write all added lines, so that they survive a power failure. For any thread.

        May be repeated after it has raised `OSError`.
        """
        with self._writing:
            while self._added:
                self._unwritten.append(encoded(self._added.popleft()))
            if self._unwritten:
                text = b"".join(self._unwritten)
                self._write(text)
                self._end += len(text)
                self._unwritten.clear()

    def finish(self, wait: Callable[[float], object] = sleep) -> None:
        """Write all added lines, again for a minute after a fault that may pass; `wait` waits a number of seconds."""
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
            import structlog  # takes longer than a command that only asks

            structlog.get_logger().warning("metrics not written", reason=str(self._not_written(error)))

    def _attempt(self) -> float | None:
        """Write waiting lines; return the seconds until the next attempt, None to make none."""
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
        """Write all of `text` at the end: the file has no buffer, and may take a part at a time."""
        self._file.truncate(self._end)  # what an attempt that failed has written
        self._file.seek(self._end)
        left = memoryview(text)
        while left:
            left = left[self._file.write(left) :]
        os.fsync(self._file.fileno())

    def _not_written(self, error: OSError) -> MetricsNotWritten:
        return MetricsNotWritten(f"cannot {self._what}: {reason_of(error)}")
