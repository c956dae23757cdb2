"""Reads what a broker has kept in a SQLite file, without writing to the file and without locking it.

A broker that is there holds its file under a lock, and one that was killed has left a write-ahead log, which SQLite
cannot read without writing. So both files are copied, and the copy is opened. A file without such a log was closed in
order: it is opened where it is, as one that nothing changes.
"""

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar
from urllib.parse import quote

from stageline.broker.control.records import StepRecord

from .base import KEPT_STEPS, StoredRun, StoreUnusable
from .sqlite import FORMAT, SqliteStore


_TRIES = 5  # copies that are made until none of the files has changed meanwhile


class SqliteReader(SqliteStore):
    """A `Store` to read from; `path` must be there. Raises `StoreUnusable`, which names it; so does every write."""

    def __init__(self, path: Path) -> None:
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
        return StoredRun() if self._empty else super().load()

    def record(self, stage: int, step: int) -> StepRecord | None:
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
        """Nothing is tried again: a command that only reads tells what is wrong."""
        try:
            return attempt()
        except sqlite3.Error as error:
            raise StoreUnusable(f"the records in {self._path} cannot be read: {error}") from error


def _address_of(path: Path) -> str:
    return f"file:{quote(str(path))}"


def _log(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _copy(path: Path, folder: Path) -> Path:
    """Copies the file and its log, as they were at one moment if possible; returns the copy's place."""
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
