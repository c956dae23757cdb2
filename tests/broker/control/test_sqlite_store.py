"""The SQLite file: what a killed process leaves in it, who may open it, and who may read it."""

import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from stageline.broker.control.records import StepRecord
from stageline.broker.control.sqlite_store import SqliteReader, SqliteStore
from stageline.broker.control.store import StoredRun, StoreUnusable


def record(stage: int, step: int) -> StepRecord:
    return StepRecord(stage, step, f"times of {stage}/{step}".encode())


def test_what_sqlite_has_kept_outlives_a_killed_process(tmp_path: Path):
    path = tmp_path / "broker.sqlite"
    lines = [
        "import os, pathlib, signal",
        "from stageline.broker.control.messages import StepRecord",
        "from stageline.broker.control.sqlite_store import SqliteStore",
        f"store = SqliteStore(pathlib.Path({str(path)!r}))",
        "store.append([StepRecord(1, 4, b'times')], {4: 0.25})",
        "store.put('run', {'id': 'a'})",
        "os.kill(os.getpid(), signal.SIGKILL)",
    ]
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False).returncode == -signal.SIGKILL
    store = SqliteStore(path)
    assert store.load() == StoredRun({"run": {"id": "a"}}, {1: 5}, {4: 0.25})
    assert store.record(1, 4) == StepRecord(1, 4, b"times")
    store.close()


def test_two_brokers_cannot_have_one_file(tmp_path: Path):
    store = SqliteStore(tmp_path / "broker.sqlite")
    with pytest.raises(StoreUnusable, match=r"broker\.sqlite: database is locked"):
        SqliteStore(tmp_path / "broker.sqlite")
    store.close()


def test_a_file_that_is_not_a_store_is_named(tmp_path: Path):
    (tmp_path / "broker.sqlite").write_text("a shopping list, long enough not to pass for an empty database file\n" * 9)
    with pytest.raises(StoreUnusable, match=r"broker\.sqlite: file is not a database. Move it away, and resume"):
        SqliteStore(tmp_path / "broker.sqlite")


def test_a_folder_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(StoreUnusable, match=r"nowhere/broker\.sqlite: unable to open"):
        SqliteStore(tmp_path / "nowhere" / "broker.sqlite")


def test_a_store_of_another_format_is_left_alone(tmp_path: Path):
    path = tmp_path / "broker.sqlite"
    SqliteStore(path).close()
    subprocess.run(
        [sys.executable, "-c", f"import sqlite3; sqlite3.connect({str(path)!r}).execute('PRAGMA user_version = 9')"],
        check=True,
    )
    with pytest.raises(StoreUnusable, match="has format 9, this version reads format 1"):
        SqliteStore(path)


@pytest.mark.parametrize("before", [None, 0o644])
def test_the_records_are_for_this_user_alone(before: int | None, tmp_path: Path):
    """The run's key is in them."""
    path = tmp_path / "broker.sqlite"
    if before is not None:
        path.touch(before)
    store = SqliteStore(path)
    store.put("run", {"id": "a"})
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    assert len(list(tmp_path.iterdir())) > 1
    store.close()


@contextmanager
def small_files() -> Iterator[Callable[[], None]]:
    """As on a full disk, until the block ends or the function is called."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def make_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, before[1]))
    try:
        yield make_room
    finally:
        make_room()


def test_a_full_disk_is_waited_for_and_named_and_nothing_is_lost(tmp_path: Path):
    told: list[str] = []

    def waiting(reason: str) -> None:
        told.append(reason)
        if len(told) == 3:
            make_room()

    path = tmp_path / "broker.sqlite"
    store = SqliteStore(path, patience=60.0, waiting=waiting)
    with small_files() as make_room:
        for step in range(200):
            store.append([record(1, step)], {step: 0.5})
            store.put("run", {"id": "a" * 2**10, "step": step})
    assert len(told) == 3
    assert re.fullmatch(
        rf"cannot keep its records in {path}: (disk I/O error|database or disk is full); "
        r"tried for \d s, gives up in (60|59) s",
        told[0],
    )
    assert store.load().finished == {1: 200}
    assert len(store.load().losses) == 200
    store.close()


def put_many(store: SqliteStore) -> None:
    for _ in range(200):
        store.put("run", {"id": "a" * 2**10})


def test_a_disk_that_stays_full_is_told_with_the_file_and_the_way_out(tmp_path: Path):
    store = SqliteStore(tmp_path / "broker.sqlite", patience=0.2)
    named = r"cannot keep its records in .*broker\.sqlite: .*, tried for 0\.2 s. Mend that, and resume the run"
    with small_files(), pytest.raises(StoreUnusable, match=named):
        put_many(store)
    store.put("run", {"id": "b"})
    assert store.load().facts == {"run": {"id": "b"}}
    store.close()


@pytest.fixture
def written(tmp_path: Path) -> SqliteStore:
    """A store with a fact, a step and a loss, still open."""
    store = SqliteStore(tmp_path / "broker.sqlite")
    store.put("run", {"id": "run-1"})
    store.append([StepRecord(0, 4, bytes(16))], {4: 0.5})
    return store


def check(path: Path) -> None:
    with closing(SqliteReader(path)) as reader:
        kept = reader.load()
        assert (kept.facts, kept.finished, kept.losses) == ({"run": {"id": "run-1"}}, {0: 5}, {4: 0.5})
        assert reader.record(0, 4) == StepRecord(0, 4, bytes(16))


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_a_broker_that_is_there_keeps_its_lock_and_goes_on(written: SqliteStore, tmp_path: Path):
    before = bytes_in(tmp_path)
    assert "broker.sqlite-wal" in before  # what was written is in there alone
    check(tmp_path / "broker.sqlite")
    assert bytes_in(tmp_path) == before
    written.put("run", {"id": "run-2"})
    written.close()


def test_the_files_of_a_killed_broker_are_read_and_left_as_they_are(written: SqliteStore, tmp_path: Path):
    killed = tmp_path / "killed"
    killed.mkdir()
    for name, content in bytes_in(tmp_path).items():
        (killed / name).write_bytes(content)
    written.close()
    before = bytes_in(killed)
    check(killed / "broker.sqlite")
    assert bytes_in(killed) == before
    with closing(SqliteStore(killed / "broker.sqlite")) as resumed:  # nothing was lost by reading
        assert resumed.load().finished == {0: 5}


def test_a_file_that_was_closed_in_order_is_read_where_it_is(written: SqliteStore, tmp_path: Path):
    written.close()
    before = bytes_in(tmp_path)
    assert list(before) == ["broker.sqlite"]
    check(tmp_path / "broker.sqlite")
    assert bytes_in(tmp_path) == before


def test_a_store_that_is_read_cannot_be_written(written: SqliteStore, tmp_path: Path):
    written.close()
    with (
        closing(SqliteReader(tmp_path / "broker.sqlite")) as reader,
        pytest.raises(StoreUnusable, match=r"broker\.sqlite"),
    ):
        reader.put("run", {})


def test_a_file_that_its_broker_had_yet_to_write_into_holds_nothing(tmp_path: Path):
    (tmp_path / "broker.sqlite").touch()
    with closing(SqliteReader(tmp_path / "broker.sqlite")) as reader:
        assert (reader.load(), reader.record(0, 0)) == (StoredRun(), None)


def test_a_damaged_file_is_named(written: SqliteStore, tmp_path: Path):
    written.close()
    (tmp_path / "broker.sqlite").write_bytes(b"no database at all, but long enough to be looked at" * 9)
    with pytest.raises(StoreUnusable, match=r"records in .*broker\.sqlite"):
        SqliteReader(tmp_path / "broker.sqlite")


def test_a_file_that_ends_in_the_middle_of_a_write_is_named(written: SqliteStore, tmp_path: Path):
    written.append([StepRecord(0, step, bytes(4096)) for step in range(5, 60)], {})
    written.close()
    path = tmp_path / "broker.sqlite"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(StoreUnusable, match=r"records in .*broker\.sqlite"), closing(SqliteReader(path)) as reader:
        reader.load()
