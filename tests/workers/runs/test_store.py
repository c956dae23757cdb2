"""The timetable as it ran: read back from the broker's records."""

from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from stageline.broker.control.records import StepRecord
from stageline.broker.control.sqlite_store import SqliteStore
from stageline.broker.control.store import MemoryStore, StoreUnusable
from stageline.pipeline.plan import read_plan
from stageline.pipeline.schedule import Action, Kind, make_schedule
from stageline.workers.runs import folder as runs
from stageline.workers.runs.records import measured, measured_timetable, open_store, recorded_run
from support.packed import packed_times
from support.redis_server import shared_server

EVERYWHERE = "0.0.0.0"  # noqa: S104 - dialled, which leads to this machine, and counts as another
LINE = make_schedule("1f1b", [(0,), (1,)], 2)


def ran(store, stage, step):
    """Keeps a step of a stage in which the n-th action began at 10 * step + n and took half a second."""
    actions = [action for action in LINE.workers[LINE.owner(stage)] if action.stage == stage]
    timed = ((action, 10 * step + n, 10 * step + n + 0.5) for n, action in enumerate(actions))
    store.append([StepRecord(stage, step, packed_times(timed))], {})


def test_every_action_comes_back_with_its_worker_step_and_times():
    store = MemoryStore()
    for stage in range(2):
        ran(store, stage, 3)
    timed = measured(store, LINE, range(3, 4))
    assert [str(each.action) for each in timed] == ["0F0", "0F1", "0B0", "0B1", "0U", "1F0", "1B0", "1F1", "1B1", "1U"]
    assert {each.step for each in timed} == {3}
    second = timed[1]
    assert (second.worker, second.action, second.start, second.end) == (0, Action(Kind.FORWARD, 0, 1), 31.0, 31.5)


def test_a_step_that_is_not_kept_is_left_out():
    store = MemoryStore()
    ran(store, 0, 2)
    assert {(each.action.stage, each.step) for each in measured(store, LINE, range(5))} == {(0, 2)}


@pytest.mark.parametrize(("steps", "shown"), [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (20, 16)])
def test_of_a_run_a_late_step_is_shown_that_no_longer_runs_the_line_empty(steps, shown, tmp_path):
    plan = read_plan("examples/mlp", sets=[f"run.dir={tmp_path}"], environment={})
    with closing(SqliteStore(runs.make_folder(plan, "run-1") / runs.STORE)) as store:
        for step in range(steps):
            ran(store, 0, step)
    assert {each.step for each in measured_timetable(plan, "run-1", LINE, steps)} == {shown}


def test_a_run_without_records_has_no_timetable(tmp_path):
    plan = read_plan("examples/mlp", sets=[f"run.dir={tmp_path}"], environment={})
    folder = runs.make_folder(plan, "run-1")
    assert measured_timetable(plan, "run-1", LINE, 5) == []
    (folder / runs.STORE).write_bytes(b"this is no database, and long enough for its header to be looked at" * 9)
    assert measured_timetable(plan, "run-1", LINE, 5) == []


@pytest.mark.parametrize(
    ("host", "insecure", "is_sealed"),
    [(EVERYWHERE, False, True), (EVERYWHERE, True, False), ("127.0.0.1", False, False)],
)
def test_records_at_a_server_that_may_be_elsewhere_are_sealed_with_this_users_key_unless_keys_are_renounced(
    host: str, insecure: bool, is_sealed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGELINE_KEY_FILE", str(tmp_path / "own.key"))
    server = shared_server()
    number = server.own_number()
    url = server.tcp_url_of(number).replace("127.0.0.1", host)
    sets = [f"run.dir={tmp_path}", f"broker.store={url}", f"broker.insecure={str(insecure).lower()}"]
    plan = read_plan("examples/mlp", sets=sets, environment={})
    with closing(open_store(plan, "run-1")) as store:
        store.put("registry", {"host": "desk-of-anna"})
    with closing(server.client(number)) as client:
        assert (b"desk-of-anna" not in client.hget("stageline:{run-1}:store:fact", "registry")) == is_sealed
    folder = runs.make_folder(plan, "run-1")
    (folder / runs.PLAN).write_bytes(msgspec.json.encode(plan.as_mapping()))
    with recorded_run(folder) as run:
        assert run.stored.facts["registry"] == {"host": "desk-of-anna"}
    if is_sealed:
        monkeypatch.setenv("STAGELINE_KEY_FILE", str(tmp_path / "another.key"))
        with pytest.raises(StoreUnusable, match=r"another key than this process has.*STAGELINE_KEY_FILE"):
            open_store(plan, "run-1")
