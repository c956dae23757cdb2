"""Reading a broker's SQLite file: while the broker is there, after it was killed, after it ended, and damaged."""

from contextlib import closing
from pathlib import Path

import pytest

from stageline.broker.control.records import StepRecord
from stageline.broker.stores.base import StoredRun, StoreUnusable
from stageline.broker.stores.sqlite import SqliteReader, SqliteStore


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
