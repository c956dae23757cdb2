"""A store of a run's records in one SQLite file, in write-ahead mode.

    fact    name -> JSON
    step    (stage, slot) -> step, times       a ring: slot is step modulo the steps kept, so the file stops growing
    loss    step -> loss

The file is for this user alone: among the facts is the run's key. `synchronous = NORMAL` gives up the last commits when
the machine loses power, never the file's integrity. A write is tried again if it fails for want of room, descriptors or
memory, or because another process has the file.

The reader neither writes to the file nor locks it. A running broker holds a lock, and a killed one has left a
write-ahead log, which SQLite cannot read without writing: the reader opens a copy of both files. A file without such a
log was closed in order, and is opened where it is, as immutable.
"""

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from time import monotonic
from typing import TypeVar
from urllib.parse import quote

import msgspec

from stageline.broker.control.records import StepRecord
from stageline.broker.control.store import KEPT_STEPS, Fact, StoredRun, StoreUnusable
from stageline.pipeline.retry import ResourceFault, passing_fault, persist, reason_of

FORMAT = 1  # of the tables below; kept as the file's user_version
_TABLES = """
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, json BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS step (stage INTEGER, slot INTEGER, step INTEGER NOT NULL, times BLOB NOT NULL,
                                 PRIMARY KEY (stage, slot)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS loss (step INTEGER PRIMARY KEY, loss REAL);
"""
_PUT_STEP = """
INSERT INTO step VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET step = excluded.step, times = excluded.times WHERE excluded.step > step.step
"""


LONGEST_PATH = 504  # bytes of the path of a file, of which SQLite can also name the log beside it
_OPENING = 5.0  # seconds that a file is waited for which cannot be opened
_PAUSE = 0.1  # seconds between two calls of `waiting`
_SYSTEM_ERRORS = {  # the primary codes of SQLite, as the system would call them
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_BUSY: errno.EAGAIN,
    sqlite3.SQLITE_LOCKED: errno.EAGAIN,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
}
_Answer = TypeVar("_Answer")
_TRIES = 5  # copies that are made until none of the files has changed meanwhile


class SqliteStore:
    """A `Store` in an SQLite file, which one process at a time may have open."""

    def __init__(
        self,
        path: Path,
        kept_steps: int = KEPT_STEPS,
        patience: float = 0.0,
        waiting: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Open the file, or make it. Raises `StoreUnusable` if that fails.

        Args:
            path: The file.
            kept_steps: Steps of each stage whose times are kept.
            patience: Seconds for which a failed write is tried again; opening is tried for a few seconds at most.
            waiting: Called several times a second with the reason while a fault lasts; it may raise.
        """
        self._path = path
        self._kept_steps = kept_steps
        self._patience = min(patience, _OPENING)
        self._waiting = waiting
        self._fault: ResourceFault | None = None
        self._connection = self._persist(self._opened)
        self._patience = patience

    def append(self, records: Sequence[StepRecord], losses: Mapping[int, float | None]) -> None:
        """Keep finished steps and their losses, all or nothing. A step's loss is the first one given."""
        rows = [(record.stage, record.step % self._kept_steps, record.step, record.times) for record in records]

        def write(transaction: sqlite3.Connection) -> None:
            transaction.executemany(_PUT_STEP, rows)
            transaction.executemany("INSERT OR IGNORE INTO loss VALUES (?, ?)", losses.items())

        self._change(write)

    def put(self, name: str, fact: Fact) -> None:
        """Keep `fact` under `name` in place of the one before."""
        row = name, msgspec.json.encode(fact)
        self._change(lambda transaction: transaction.execute("INSERT OR REPLACE INTO fact VALUES (?, ?)", row))

    def load(self) -> StoredRun:
        """Return all that is kept."""
        facts = {name: msgspec.json.decode(text, type=Fact) for name, text in self._rows("SELECT * FROM fact")}
        finished = dict(self._rows("SELECT stage, max(step) + 1 FROM step GROUP BY stage"))
        return StoredRun(facts, finished, dict(self._rows("SELECT step, loss FROM loss")))

    def record(self, stage: int, step: int) -> StepRecord | None:
        """Return the record of `step` of `stage`, without its loss, or None if it is not kept."""
        where = stage, step % self._kept_steps, step
        rows = self._rows("SELECT times FROM step WHERE stage = ? AND slot = ? AND step = ?", where)
        return next((StepRecord(stage, step, times) for (times,) in rows), None)

    def records(self, wanted: Sequence[tuple[int, int]]) -> list[StepRecord]:
        """Return the records of these stages and steps that are kept."""
        found = (self.record(stage, step) for stage, step in wanted)
        return [record for record in found if record is not None]

    def go_back(self, stages: Sequence[int], step: int) -> None:
        """Forget that the stages have finished `step` and later steps; losses stay."""
        rows = [(stage, step) for stage in stages]
        self._change(
            lambda transaction: transaction.executemany("DELETE FROM step WHERE stage = ? AND step >= ?", rows)
        )

    def begin(self) -> None:
        """Forget everything: another run begins."""

        def forget(transaction: sqlite3.Connection) -> None:
            for table in ("fact", "step", "loss"):
                transaction.execute(f"DELETE FROM {table}")  # noqa: S608  # our own names

        self._change(forget)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _opened(self) -> sqlite3.Connection:
        _make_private(self._path)
        with ExitStack() as cleanup:
            connection = sqlite3.connect(self._path, timeout=0.5, isolation_level=None)
            cleanup.callback(connection.close)
            self._prepare(connection)
            cleanup.pop_all()
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # two brokers on one file would undo each other
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        ((written,),) = connection.execute("PRAGMA user_version").fetchall()
        if written not in (0, FORMAT):
            raise StoreUnusable(f"{self._path} has format {written}, this version reads format {FORMAT}")
        connection.executescript(f"BEGIN EXCLUSIVE; {_TABLES} PRAGMA user_version = {FORMAT}; COMMIT;")

    def _rows(self, query: str, values: Iterable[int] = ()) -> list[tuple]:  # type: ignore[type-arg]
        of = tuple(values)
        return self._persist(lambda: self._connection.execute(query, of).fetchall())

    def _change(self, change: Callable[[sqlite3.Connection], object]) -> None:
        """Carry out all of `change`, or nothing."""

        def attempt() -> None:
            with self._connection:
                self._connection.execute("BEGIN")
                change(self._connection)

        self._persist(attempt)

    def _persist(self, attempt: Callable[[], _Answer]) -> _Answer:
        def told() -> _Answer:
            with _system_errors(self._path):
                return attempt()

        with suppress(sqlite3.Error, OSError, MemoryError):  # nearly always: the rest is for a fault
            return told()
        what = f"keep its records in {self._path}"
        try:
            return persist(told, what, self._note, now=monotonic, wait=self._wait, bound=self._patience)
        except (sqlite3.Error, OSError, MemoryError) as error:
            tried = f", tried for {self._patience:g} s" if self._fault is not None else ""
            raise StoreUnusable(f"the broker cannot {what}: {reason_of(error)}{tried}{_advice(error)}") from error
        finally:
            self._fault = None

    def _note(self, fault: ResourceFault | None) -> None:
        self._fault = fault or self._fault

    def _wait(self, seconds: float) -> None:
        until = monotonic() + seconds
        while (left := until - (now := monotonic())) > 0:
            if self._fault is not None:
                self._waiting(self._fault.told(now))
            Event().wait(min(left, _PAUSE))


@contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """Raise `OSError` in place of SQLite's error for a fault that may pass."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_CANTOPEN:
            _demand_descriptors(path.parent)
        if code in _SYSTEM_ERRORS:
            raise OSError(_SYSTEM_ERRORS[code], str(error)) from error
        raise


def _demand_descriptors(folder: Path) -> None:
    """Raise the passing `OSError` for which SQLite cannot open a file in `folder`, if there is one.

    The folder is opened, not the file: closing the file would give up SQLite's locks.
    """
    try:
        os.close(os.open(folder, os.O_RDONLY))
    except OSError as error:
        if passing_fault(error):
            raise


def _advice(error: Exception) -> str:
    if isinstance(error, OSError):
        return ". Mend that, and resume the run"
    broken = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
    return ". Move it away, and resume the run: it goes on with what the workers know" if broken else ""


def _make_private(path: Path) -> None:
    """Make the file if there is none, for this user alone; SQLite gives the files beside it the same permissions."""
    with suppress(OSError):  # SQLite will say what is wrong
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)


class SqliteReader(SqliteStore):
    """A `Store` that reads an existing file. Every write raises `StoreUnusable`."""

    def __init__(self, path: Path) -> None:
        """Open the file at `path`, or a copy if it has a write-ahead log.

        Raises `StoreUnusable`, which names the file, if it cannot be read or is not there.
        """
        self._path = path
        self._kept_steps = KEPT_STEPS
        self._empty = False
        if not _log(path).exists():
            self._open(f"{_address_of(path.absolute())}?mode=ro&immutable=1")
            return
        with TemporaryDirectory(prefix="stageline-") as folder:  # removed at once: what is open stays readable
            self._open(f"{_address_of(_copy(path, Path(folder)))}?mode=rw")

    def _open(self, address: str) -> None:
        with ExitStack() as cleanup:
            self._connection = self._persist(lambda: sqlite3.connect(address, uri=True, isolation_level=None))
            cleanup.callback(self._connection.close)
            self._persist(self._check_format)
            cleanup.pop_all()

    def load(self) -> StoredRun:
        """Return all that is kept; an empty run if the broker has not written anything yet."""
        return StoredRun() if self._empty else super().load()

    def record(self, stage: int, step: int) -> StepRecord | None:
        """Return the record of `step` of `stage`, without its loss, or None if it is not kept."""
        return None if self._empty else super().record(stage, step)

    def _check_format(self) -> None:
        self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # without a file for memory that is shared
        self._connection.execute("PRAGMA synchronous = OFF")  # a copy need not be on the disk
        self._connection.execute("PRAGMA query_only = ON")
        ((written,),) = self._connection.execute("PRAGMA user_version").fetchall()
        tables = self._connection.execute("SELECT name FROM sqlite_master").fetchall()
        self._empty = written == 0 and not tables  # its broker had yet to write into it
        if written != FORMAT and not self._empty:
            raise StoreUnusable(
                f"the records in {self._path} have format {written}, this version reads format {FORMAT}"
            )

    def _persist(self, attempt: Callable[[], _Answer]) -> _Answer:
        """Try once: a command that only reads reports the fault at once."""
        try:
            return attempt()
        except sqlite3.Error as error:
            raise StoreUnusable(f"the records in {self._path} cannot be read: {error}") from error


def _address_of(path: Path) -> str:
    return f"file:{quote(str(path))}"


def _log(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _copy(path: Path, folder: Path) -> Path:
    """Copy the file and its log, as they were at one moment if possible; return the copy's path."""
    for _ in range(_TRIES):
        before = _state(path)
        for file in (path, _log(path)):
            if file.exists():
                shutil.copyfile(file, folder / file.name)
        if _state(path) == before:
            break
    return folder / path.name


def _state(path: Path) -> list[tuple[int, int] | None]:
    return [(stat.st_size, stat.st_mtime_ns) if (stat := _stat(file)) else None for file in (path, _log(path))]


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except FileNotFoundError:
        return None
