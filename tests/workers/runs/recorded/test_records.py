"""States of runs, by the files in their folders."""

from contextlib import closing
from pathlib import Path
from time import time

import msgspec
import pytest

from stageline.broker.control.sqlite_store import SqliteStore
from stageline.broker.coordinator.records import OBSERVED
from stageline.pipeline.plan import read_plan
from stageline.workers.runs.account import account_of
from stageline.workers.runs.listing import ending_of, recorded_answer, run_rows
from stageline.workers.runs.owner import RunOwner, read_owner, write_owner
from stageline.workers.runs.records import RecordsDamaged, recorded_run
from support.conversation import name
from support.scripted import SCRIPT, reach, script_says, scripted

PLAN = read_plan("examples/mlp", sets=["run.steps=20"], environment={}).resolved(2)
PLACES = {"begun": True, "incarnation": 2, "members": [], "checkpoints": {"complete": 10, "newer": [[], []]}}
ENDED = {"phase": "failed", "reason": "worker 1 failed", "code": 1}


def record(
    folder: Path, *, owner: RunOwner | None = None, at: float = 0.0, plan: dict | None = None, **facts: dict
) -> Path:
    """A run's folder, whose records were last written `at` that time. `plan`: another one than `PLAN`."""
    folder.mkdir(exist_ok=True)
    write_owner(folder, PLAN, "train")
    gone = owner or msgspec.structs.replace(msgspec.convert(read_owner(folder), RunOwner), started=0.0)
    (folder / "process.json").write_bytes(msgspec.json.encode(gone))
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan or PLAN.as_mapping()))
    with closing(SqliteStore(folder / "broker.sqlite")) as store:
        for name, fact in facts.items():
            store.put(name, fact)
        if at:
            store.put(OBSERVED, {"at": at, "training_steps": 20})
    return folder


@pytest.mark.parametrize(
    ("facts", "state", "text", "action"),
    [
        ({}, "killed", "was killed or lost its machine before it began", "begin another run: stageline train"),
        ({"registry": PLACES}, "killed", "at step 10 of 20; checkpoint 10 is complete", "--resume run-1"),
        ({"outcome": ENDED}, "failed", "worker 1 failed", "correct the cause, and begin another run: stageline train"),
        ({"registry": PLACES, "outcome": ENDED}, "failed", "worker 1 failed", "correct the cause; then go on with: "),
        ({"registry": PLACES, "outcome": {**ENDED, "code": 75}}, "stopped", "worker 1 failed", "go on with: stageline"),
        ({"registry": PLACES, "outcome": {**ENDED, "code": 78}}, "failed", "worker 1 failed", "correct the plan"),
    ],
)
def test_a_run_whose_process_is_gone(facts, state, text, action, tmp_path):
    with recorded_run(record(tmp_path / "run-1", **facts)) as run:
        assert str(run.state) == state
        assert text in ending_of(run).text
        assert action in ending_of(run).action


def of_script() -> dict:
    """The plan of a scripted run: it says nothing of steps."""
    plan = dict(PLAN.as_mapping())
    run = {key: value for key, value in plan["run"].items() if key != "steps"}
    return {**plan, "data": {**plan["data"], "source": "script:batches"}, "run": run}


@pytest.mark.parametrize(
    ("facts", "state", "text"),
    [
        ({}, "killed", "the run was killed or lost its machine at step 10; checkpoint 10 is complete"),
        ({"outcome": {**ENDED, "code": 75, "reason": "the script is gone"}}, "stopped", "the script is gone"),
    ],
)
def test_a_scripted_run_goes_on_from_its_script_and_has_no_number_of_steps(facts, state, text, tmp_path):
    folder = record(tmp_path / "run-1", plan=of_script(), registry=PLACES, **facts)
    with recorded_run(folder) as run:
        assert (str(run.state), ending_of(run).text) == (state, text)
        assert ending_of(run).action == f"go on with: Line.resume('{folder}', ...) in the script"
    (row,) = run_rows(tmp_path)
    assert (row.steps, row.total, row.script) == (10, None, True)


def test_the_records_of_a_scripted_run_answer_as_its_broker_would(tmp_path):
    talk = scripted()
    reach(talk, 20)
    talk.send(name(SCRIPT), script_says("runs its own code after call 24"))
    talk.core.keep_observation(talk.now)
    facts = talk.store.load().facts
    folder = record(tmp_path / "run-1", plan=of_script(), registry=facts["registry"], observed=facts["observed"])
    with recorded_run(folder) as run:
        status = recorded_answer(run, "status", {})
        assert (status["training_steps"], status["checkpoint"], len(status["workers"])) == (None, 20, 2)
        assert status["script"]["now"] == "runs its own code after call 24"
        assert recorded_answer(run, "why", {})["action"].startswith("go on with: Line.resume(")
        assert recorded_answer(run, "story", {"step": "19", "microbatch": "0"})["stages"][1]["state"] == "done"


def test_a_run_whose_process_is_there_is_starting_until_its_workers_are_and_also_when_it_is_resumed(tmp_path):
    write_owner(tmp_path, PLAN, "train")
    mine = msgspec.convert(read_owner(tmp_path), RunOwner)
    for facts, at, state in (
        ({}, 0.0, "starting"),
        ({"registry": PLACES}, time(), "running"),  # and its broker does not answer
        ({"registry": PLACES, "outcome": ENDED}, mine.began + 5, "failed"),
        ({"registry": {**PLACES, "begun": False}, "outcome": ENDED}, mine.began - 5, "starting"),  # resumed since
    ):
        with recorded_run(record(tmp_path / "run-1", owner=mine, at=at, **facts)) as run:
            assert str(run.state) == state
            assert ("its broker does not answer" in ending_of(run).text) == (state == "running")


@pytest.mark.parametrize(
    ("pause", "state"),
    [
        ({"by": "ada", "reason": "a backup", "since": 1.0, "step": 12}, "paused"),
        ({"by": "ada", "reason": "a backup", "since": 1.0, "step": None}, "running"),  # workers have not agreed on it
        ({"by": "ada", "reason": "a backup", "since": 1.0, "step": 12, "until": 2.0, "ended": "bob"}, "running"),
    ],
)
def test_a_paused_run_is_told_by_its_records_from_a_running_one(pause, state, tmp_path):
    """`run ls` showed a run that a person had paused as running."""
    write_owner(tmp_path, PLAN, "train")
    mine = msgspec.convert(read_owner(tmp_path), RunOwner)
    pauses = {"number": 7, "closed": 12, "pauses": [pause]}
    (tmp_path / "runs").mkdir()
    folder = record(tmp_path / "runs" / "run-1", owner=mine, at=time(), registry=PLACES, pauses=pauses)
    (row,) = run_rows(folder.parent)
    assert row.state == state
    with recorded_run(folder) as run:
        found = account_of(run)
    (told,) = found.pauses
    assert (told.by, told.step, told.ended) == ("ada", pause["step"], pause.get("ended", ""))
    if state == "paused":
        for reason in (row.reason, found.reason):
            assert "paused by ada" in reason
            assert "before step 12 (a backup)" in reason
        assert f"run resume {folder}" in found.action
    else:
        assert (row.reason, found.reason) == (None, None)
    for gone, end in ((None, "killed"), (mine, "stopped")):
        facts = {"outcome": {**ENDED, "code": 75}} if end == "stopped" else {}
        again = record(tmp_path / end, owner=gone, registry=PLACES, pauses=pauses, **facts)
        with recorded_run(again) as run:
            assert str(run.state) == end


@pytest.mark.parametrize(
    ("plan", "command", "who"), [(None, "train", "`train`"), (of_script(), "script", "the script's launcher")]
)
def test_who_restarts_a_broker_that_is_away_is_named(plan, command, who, tmp_path):
    write_owner(tmp_path, PLAN, command)
    mine = msgspec.convert(read_owner(tmp_path), RunOwner)
    with recorded_run(record(tmp_path / "run-1", plan=plan, owner=mine, at=time(), registry=PLACES)) as run:
        assert ending_of(run).action == f"wait: workers train without a broker, and {who} restarts it"


def test_records_are_as_old_as_the_systems_clock_says_although_it_was_set_during_the_run(tmp_path):
    write_owner(tmp_path, PLAN, "train")
    elsewhere = msgspec.structs.replace(msgspec.convert(read_owner(tmp_path), RunOwner), host="elsewhere")
    folder, at = record(tmp_path / "run-1", owner=elsewhere, registry=PLACES), time() - 3600
    with closing(SqliteStore(folder / "broker.sqlite")) as store:
        store.put(OBSERVED, {"at": at, "behind": 3600.0, "training_steps": 20})
    with recorded_run(folder) as run:
        assert str(run.state) == "running"
        assert (run.observed_at, run.as_of) == (at, at + 3600)  # ages in the records are by the run's own clock


def test_of_a_process_on_another_machine_only_the_age_of_the_records_tells(tmp_path):
    write_owner(tmp_path, PLAN, "train")
    elsewhere = msgspec.structs.replace(msgspec.convert(read_owner(tmp_path), RunOwner), host="elsewhere")
    for at, state in ((time(), "running"), (time() - 60, "killed")):
        with recorded_run(record(tmp_path / "run-1", owner=elsewhere, at=at, registry=PLACES)) as run:
            assert str(run.state) == state


@pytest.mark.parametrize("registry", [{"begun": True}, {**PLACES, "checkpoints": None}, {**PLACES, "checkpoints": {}}])
def test_records_of_a_wrong_shape_are_named(registry, tmp_path):
    folder = record(tmp_path / "run-1", registry=registry)
    with pytest.raises(RecordsDamaged, match=r"run-1/broker\.sqlite is damaged"), recorded_run(folder) as run:
        ending_of(run)


def test_a_damaged_run_does_not_hide_the_others(tmp_path):
    record(tmp_path / "run-1", registry=PLACES)
    (record(tmp_path / "run-2", registry=PLACES) / "broker.sqlite").write_bytes(b"?" * 8192)
    record(tmp_path / "run-3", registry=PLACES)
    rows = list(run_rows(tmp_path))
    assert [(row.run, row.state) for row in rows] == [("run-1", "killed"), ("run-2", "damaged"), ("run-3", "killed")]
    assert "run-2/broker.sqlite" in str(rows[1].reason)
    assert (rows[2].steps, rows[2].total, rows[2].checkpoint, rows[2].name) == (10, 20, 10, "mlp")
