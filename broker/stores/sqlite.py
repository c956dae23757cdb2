"""Keeps a run in one SQLite file, in write-ahead mode: a commit survives the death of the process.

    fact    name -> JSON
    step    (stage, slot) -> step, times       a ring: slot is step modulo the steps kept, so the file stops growing
    loss    step -> loss

The file is for this user alone: among the facts is the run's key.
`synchronous = NORMAL` gives up the last commits when the machine loses power, never the file's integrity.
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from stageline.broker.control.protocol import StepRecord

from .base import KEPT_STEPS, Fact, StoredRun, StoreUnusable

_FORMAT = 1  # of the tables below; kept as the file's user_version
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


class SqliteStore:
    """See `Store`. One process at a time may have a file open."""

    def __init__(self, path: Path, kept_steps: int = KEPT_STEPS) -> None:
        self._path = path
        self._kept_steps = kept_steps
        _make_private(path)
        with self._explained(), ExitStack() as cleanup:
            self._connection = sqlite3.connect(path, timeout=0.5, isolation_level=None)
            cleanup.callback(self._connection.close)
            self._open()
            cleanup.pop_all()

    def append(self, records: Sequence[StepRecord], losses: Mapping[int, float | None]) -> None:
        rows = [(record.stage, record.step % self._kept_steps, record.step, record.times) for record in records]
        with self._transaction() as transaction:
            transaction.executemany(_PUT_STEP, rows)
            transaction.executemany("INSERT OR IGNORE INTO loss VALUES (?, ?)", losses.items())

    def put(self, name: str, fact: Fact) -> None:
        with self._transaction() as transaction:
            transaction.execute("INSERT OR REPLACE INTO fact VALUES (?, ?)", (name, msgspec.json.encode(fact)))

    def load(self) -> StoredRun:
        facts = {name: msgspec.json.decode(text, type=Fact) for name, text in self._rows("SELECT * FROM fact")}
        finished = dict(self._rows("SELECT stage, max(step) + 1 FROM step GROUP BY stage"))
        return StoredRun(facts, finished, dict(self._rows("SELECT step, loss FROM loss")))

    def record(self, stage: int, step: int) -> StepRecord | None:
        where = stage, step % self._kept_steps, step
        rows = self._rows("SELECT times FROM step WHERE stage = ? AND slot = ? AND step = ?", where)
        return next((StepRecord(stage, step, times) for (times,) in rows), None)

    def go_back(self, stages: Sequence[int], step: int) -> None:
        with self._transaction() as transaction:
            transaction.executemany("DELETE FROM step WHERE stage = ? AND step >= ?", [(s, step) for s in stages])

    def begin(self) -> None:
        with self._transaction() as transaction:
            for table in ("fact", "step", "loss"):
                transaction.execute(f"DELETE FROM {table}")  # noqa: S608 - the three names above

    def close(self) -> None:
        self._connection.close()

    def _open(self) -> None:
        self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # two brokers on one file would undo each other
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        ((written,),) = self._connection.execute("PRAGMA user_version").fetchall()
        if written not in (0, _FORMAT):
            raise StoreUnusable(f"{self._path} has format {written}, this version reads format {_FORMAT}")
        self._connection.executescript(f"BEGIN EXCLUSIVE; {_TABLES} PRAGMA user_version = {_FORMAT}; COMMIT;")

    def _rows(self, query: str, values: Iterable[int] = ()) -> list[tuple]:  # type: ignore[type-arg]
        with self._explained():
            return self._connection.execute(query, tuple(values)).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._explained(), self._connection:
            self._connection.execute("BEGIN")
            yield self._connection

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            broken = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
            raise StoreUnusable(
                f"the broker cannot keep its records in {self._path}: {error}"
                + (". Move it away, and resume the run: it goes on with what the workers know" if broken else "")
            ) from error


def _make_private(path: Path) -> None:
    """Makes the file if there is none; SQLite gives the files beside it the same permissions."""
    with suppress(OSError):  # SQLite will say what is wrong
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
