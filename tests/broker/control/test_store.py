"""Every store keeps the same promise; SQLite's also when the process is killed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stageline.broker.control.records import StepRecord
from stageline.broker.control.sqlite_store import SqliteStore
from stageline.broker.control.store import MemoryStore, Store, StoredRun
from stageline.broker.transports.base import Backend
from support.transports import queues_url, registered


def at_server(backend: Backend, folder: Path) -> Store:
    return backend.open_store(queues_url(backend), "run", 20.0, print, kept_steps=10)


STORES: dict[str, Callable[[Path], Store]] = {
    "memory": lambda folder: MemoryStore(kept_steps=10),
    "sqlite": lambda folder: SqliteStore(folder / "broker.sqlite", kept_steps=10),
    **{
        scheme: lambda folder, backend=backend: backend.open_store(
            queues_url(backend), "run", 20.0, print, kept_steps=10
        )
        for scheme, backend in registered().items()
        if backend.keeps_records
    },
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


def test_the_records_of_many_steps_are_read_at_once_as_far_as_they_are_kept(store: Store):
    store.append([record(stage, step) for stage in (0, 1) for step in range(12)], {})
    wanted = [(stage, step) for step in (0, 5, 11, 30) for stage in (0, 1)]
    assert store.records(wanted) == [record(0, 5), record(1, 5), record(0, 11), record(1, 11)]
    assert store.records([]) == []


def test_a_fact_takes_the_place_of_the_one_before(store: Store):
    store.put("run", {"id": "a"})
    store.put("run", {"id": "b"})
    assert store.load().facts == {"run": {"id": "b"}}


def test_appending_twice_is_appending_once(store: Store):
    for _ in range(2):
        store.append([record(0, 0)], {0: 0.5})
    store.append([], {0: 0.7})
    assert store.load() == StoredRun({}, {0: 1}, {0: 0.5})


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


def test_a_fact_comes_back_as_json_types_whatever_the_caller_does_to_it_later():
    store, stages = MemoryStore(), [0, 1]
    store.put("registry", {"stages": stages, "place": (1, 2)})
    stages.append(2)
    assert store.load().facts == {"registry": {"stages": [0, 1], "place": [1, 2]}}


def test_what_was_loaded_can_be_changed_without_changing_the_store():
    store = MemoryStore()
    store.put("run", {"id": "run-1"})
    store.load().facts["run"]["id"] = "another"
    assert store.load().facts["run"] == {"id": "run-1"}
