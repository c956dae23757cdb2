"""Every store keeps the same promise; SQLite's also when the process is killed."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stageline.broker.control.protocol import StepRecord
from stageline.broker.stores.base import Store, StoredRun, StoreUnusable
from stageline.broker.stores.memory import MemoryStore
from stageline.broker.stores.redis import RedisStore
from stageline.broker.stores.sqlite import SqliteStore
from support.redis_server import shared_server

STORES: dict[str, Callable[[Path], Store]] = {
    "memory": lambda folder: MemoryStore(kept_steps=10),
    "sqlite": lambda folder: SqliteStore(folder / "broker.sqlite", kept_steps=10),
    "redis": lambda folder: RedisStore(shared_server().own_database(), "run", kept_steps=10),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store = STORES[request.param](tmp_path)
    yield store
    store.close()


def record(stage: int, step: int) -> StepRecord:
    return StepRecord(stage, step, f"times of {stage}/{step}".encode())


def test_a_new_store_knows_nothing(store: Store):
    assert store.load() == StoredRun()
    assert store.record(0, 0) is None


def test_what_was_kept_is_loaded(store: Store):
    store.append([record(0, 0), record(0, 1), record(1, 0)], {0: 0.5, 1: None})
    store.put("run", {"id": "a", "workers": {"0": [1, "tcp://x"]}})
    assert store.load() == StoredRun(
        {"run": {"id": "a", "workers": {"0": [1, "tcp://x"]}}}, {0: 2, 1: 1}, {0: 0.5, 1: None}
    )
    assert store.record(0, 1) == record(0, 1)


def test_a_fact_takes_the_place_of_the_one_before(store: Store):
    store.put("run", {"id": "a"})
    store.put("run", {"id": "b"})
    assert store.load().facts == {"run": {"id": "b"}}


def test_appending_twice_is_appending_once(store: Store):
    for _ in range(2):
        store.append([record(0, 0)], {0: 0.5})
    store.append([], {0: 0.7})
    assert store.load() == StoredRun({}, {0: 1}, {0: 0.5})


def test_of_two_brokers_the_one_that_wrote_first_later_stops():
    url = shared_server().own_database()
    with closing(RedisStore(url, "run")) as one, closing(RedisStore(url, "run")) as other:
        one.put("run", {"id": "a"})
        assert other.load().facts == {"run": {"id": "a"}}
        one.put("run", {"id": "b"})  # whoever only looks takes nothing over
        other.put("run", {"id": "c"})
        with pytest.raises(StoreUnusable, match="another broker has taken over"):
            one.put("run", {"id": "d"})


def test_a_server_that_is_away_is_told_of_while_it_is_waited_for():
    heard: list[str] = []
    with pytest.raises(StoreUnusable, match="cannot be reached"):
        RedisStore("redis://127.0.0.1:1/0", "run", patience=0.1, waiting=heard.append)
    assert "Connection refused" in heard[0]


def test_old_times_are_forgotten_and_losses_are_not(store: Store):
    for step in range(25):
        store.append([record(0, step)], {step: float(step)})
    assert [step for step in range(25) if store.record(0, step)] == list(range(15, 25))
    assert len(store.load().losses) == 25


def test_a_late_record_does_not_push_out_a_newer_one(store: Store):
    store.append([record(0, 12)], {})
    store.append([record(0, 2)], {})
    assert store.record(0, 2) is None
    assert store.record(0, 12) == record(0, 12)
    assert store.load().finished == {0: 13}


def test_stages_that_go_back_have_finished_less_and_losses_stay(store: Store):
    store.append([record(stage, step) for stage in (0, 1, 2) for step in range(4)], {3: 0.25})
    store.go_back([0, 2], 1)
    assert store.load() == StoredRun({}, {0: 1, 1: 4, 2: 1}, {3: 0.25})
    assert (store.record(0, 1), store.record(1, 3)) == (None, record(1, 3))
    store.append([StepRecord(0, 1, b"again")], {})
    assert store.record(0, 1) == StepRecord(0, 1, b"again")
    store.go_back([0], 0)
    assert 0 not in store.load().finished


def test_another_run_begins_with_an_empty_store(store: Store):
    store.append([record(0, 0)], {0: 0.5})
    store.put("run", {"id": "a"})
    store.begin()
    assert store.load() == StoredRun()
    assert store.record(0, 0) is None


def test_what_sqlite_has_kept_outlives_a_killed_process(tmp_path: Path):
    path = tmp_path / "broker.sqlite"
    lines = [
        "import os, pathlib, signal",
        "from stageline.broker.control.protocol import StepRecord",
        "from stageline.broker.stores.sqlite import SqliteStore",
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
