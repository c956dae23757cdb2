"""Record of use: a line of JSON for each use of a data source, written before the source is opened, and as it is read.

    {"at": "2026-11-28T13:37:14Z", "event": "begin", "source": "data.py:batches", "run": "", "batches": 0, ...}
    {"at": "2026-11-28T13:37:16Z", "event": "run", "run": "scans-20261128-133710-41c7", "worker": 0, ...}
    {"at": "2026-11-28T13:37:16Z", "event": "read", "batches": 1, "rows": 64, ...}       after 1, 2, 4, ... batches
    {"at": "2026-11-28T13:37:55Z", "event": "end", "batches": 50, "rows": 3200, ...}      none if it was killed

A line is added to the file in one write and flushed to the disk: a process that is killed leaves whole lines, and at
most the last one incomplete. A line that cannot be written ends the use.
"""

import getpass
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from stageline.pipeline.data import Batch, Source, rows
from stageline.pipeline.errors import DataError, StagelineError


class UseNotRecorded(StagelineError):
    """Error that the use of data cannot be recorded. The data are not used then.

    Mend: Make room on that disk, or make the folder writable for the user of the worker; the run can be resumed.

    Example: the use of data.py:batches cannot be recorded in data-use.jsonl: No space left on device. The data are not
    used
    """

    error_code = "SL612"


class UseLine(msgspec.Struct, frozen=True):
    """Line of the record.

    Attributes:
        at: Time, in UTC.
        event: "begin", "run", "read" or "end".
        use: Word that the lines of one use have in common.
        process: Command that opened the source.
        source: Names of the objects that the source is made of.
        plan: Digest of the plan.
        name: Name of the plan.
        run: Id of the run; "" before the process has its place in one, and for a trial.
        worker: Index of the worker; None before that.
        batches: Number of batches that the source has given out.
        rows: Number of rows in them.
        host: Machine of the process.
        user: User who started the process.
        pid: Id of the process.
        asked_by: Name of who asked for the plan, as its entry has it.
    """

    at: str
    event: str
    use: str
    process: str
    source: tuple[str, ...]
    plan: str
    name: str
    run: str
    worker: int | None
    batches: int
    rows: int
    host: str
    user: str
    pid: int
    asked_by: str


def append_line(file: Path, line: UseLine) -> None:
    """Add `line` to `file`, which is made if it is missing. Raises `UseNotRecorded`."""
    text = msgspec.json.encode(line) + b"\n"
    try:
        opened = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            length = os.fstat(opened).st_size
            whole = not length or os.pread(opened, 1, length - 1) == b"\n"
            text = text if whole else b"\n" + text  # after a line that was cut off
            if os.write(opened, text) < len(text):
                raise OSError(0, "only a part of the line could be written")
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as error:
        names = ", ".join(line.source)
        raise UseNotRecorded(
            f"the use of {names} cannot be recorded in {file}: {error.strerror}. The data are not used"
        ) from error


class DataUse:
    """Use of a data source by this process, from its begin to its end."""

    def __init__(self, file: Path, **known: Any) -> None:
        """Record the begin of the use.

        Args:
            file: File of the record.
            known: Fields of the lines: process, source, plan, name, asked_by.

        Raises:
            UseNotRecorded: The line cannot be written.
        """
        who: dict[str, Any] = {"host": socket.gethostname(), "user": _user(), "pid": os.getpid()}
        self._file, self._ended = file, False
        self._line = UseLine(
            at="", event="", use=secrets.token_hex(6), run="", worker=None, batches=0, rows=0, **who, **known
        )
        self._add("begin")

    def joined(self, run: str, worker: int) -> None:
        """Record the run and the worker that the data are used for."""
        if not self._line.run:
            self._line = replace(self._line, run=run, worker=worker)
            self._add("run")

    def gave(self, number: int) -> None:
        """Count a batch of `number` rows. Records it if the number of batches is a power of two."""
        batches = self._line.batches + 1
        self._line = replace(self._line, batches=batches, rows=self._line.rows + number)
        if not batches & (batches - 1):
            self._add("read")

    def end(self) -> None:
        """Record the end of the use, in the process that began it and once."""
        if not self._ended and self._line.pid == os.getpid():
            self._ended = True
            self._add("end")

    def _add(self, event: str) -> None:
        self._line = replace(self._line, at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), event=event)
        append_line(self._file, self._line)


def _user() -> str:
    with suppress(OSError, KeyError):  # a user without a name, as in some containers
        return getpass.getuser()
    return str(os.getuid())


class UsedSource:
    """Source whose batches are counted for a record of use, and given out while they are allowed."""

    def __init__(self, source: Source, use: DataUse, demand: Callable[[], None]) -> None:
        """Take the source.

        Args:
            source: Source that is opened.
            use: Counts the batches.
            demand: Raises an error once the data may not be used any more.
        """
        self._source, self._use, self._demand = source, use, demand

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return self._source.steps_per_epoch

    def batch(self, step: int) -> Batch:
        """Return the batch of `step`. Raises `UseNotRecorded`, and what the source raises."""
        self._demand()
        batch = self._source.batch(step)
        self._count(batch)
        return batch

    def held_out(self) -> "Batch | Source | None":
        """Return the rows held out: counted as a batch if they are in memory, else as they are drawn."""
        kept = self._source.held_out()
        if kept is None:
            return None
        if not isinstance(kept, tuple | list):
            return UsedSource(kept, self._use, self._demand)
        self._count(kept)
        return kept

    def __getattr__(self, name: str) -> Any:
        """Return what the source has beyond a plain one, such as `samples`."""
        return getattr(self._source, name)

    def _count(self, batch: object) -> None:
        number = 0
        with suppress(DataError):  # of a wrong form, which the run refuses
            number = rows(batch)  # type: ignore[arg-type]  # the source is the user's
        self._use.gave(number)
