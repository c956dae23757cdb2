"""Runs are found by the files in their folders."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from stageline.broker.control.sqlite_store import LONGEST_PATH, SqliteStore
from stageline.pipeline.plan import Plan, PlanRefused, read_plan
from stageline.workers.disk.atomic_file import write_json
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import FolderUnusable, NoSuchRun


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return read_plan("examples/mlp", sets=[f"run.dir={tmp_path}"], environment={})


def begin(plan: Plan, run: str, at: float) -> Path:
    folder = runs.make_folder(plan, run)
    write_json(folder / runs.PLAN, plan.as_mapping())
    os.utime(folder / runs.PLAN, (at, at))
    return folder


def test_the_newest_unfinished_run_of_the_plans_name_is_resumed(plan):
    begin(plan, "mlp-1", 10)
    begin(plan, "mlp-2", 30)
    write_json(begin(plan, "mlp-3", 50) / runs.RESULT, {})
    begin(plan, "other-4", 70)
    assert runs.run_to_resume(plan, "") == "mlp-2"
    assert runs.run_to_resume(plan, "mlp-1") == "mlp-1"
    assert runs.newest(plan).name == "mlp-3"
    assert runs.newest_in(plan.run.dir).name == "other-4"


def test_without_a_run_to_resume_that_is_reported(plan):
    with pytest.raises(NoSuchRun, match="there is no run mlp-7"):
        runs.run_to_resume(plan, "mlp-7")
    with pytest.raises(NoSuchRun, match="no unfinished run of mlp"):
        runs.run_to_resume(plan, "")
    assert runs.newest_in(plan.run.dir) is None


def test_a_run_that_has_finished_is_not_resumed(plan):
    """Its result was written again, without its steps and metrics."""
    write_json(begin(plan, "mlp-1", 10) / runs.RESULT, {})
    with pytest.raises(NoSuchRun, match=r"run mlp-1 has finished: `stageline status .*mlp-1` shows its result"):
        runs.run_to_resume(plan, "mlp-1")
    with pytest.raises(NoSuchRun, match=r"or go on with mlp-1 by --set run.steps=\d+"):
        runs.run_to_resume(plan, "")


def test_the_name_of_a_run_in_place_of_its_folder_is_refused_with_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert runs.no_run(Path("mlp-1")).endswith("`stageline run ls` lists those in ./runs")
    (tmp_path / "runs/mlp-1").mkdir(parents=True)
    (tmp_path / "runs/mlp-1" / runs.PLAN).touch()
    assert runs.no_run(Path("mlp-1")).endswith("did you mean runs/mlp-1?")


def test_a_run_is_resumed_with_its_own_plan_only(plan):
    folder = begin(plan, "mlp-1", 10)
    runs.require_same_plan(plan, folder)
    other = read_plan("examples/mlp", sets=[f"run.dir={plan.run.dir}", "run.seed=9"], environment={})
    with pytest.raises(PlanRefused, match=r"run mlp-1 was begun with another plan: .*seed"):
        runs.require_same_plan(other, folder)


def test_a_folder_whose_path_is_not_utf8_is_refused(tmp_path):
    """Its path is in records, which are UTF-8: a script ended with a traceback of the encoder."""
    plan = read_plan("examples/mlp", sets=[f"run.dir={tmp_path}"], environment={})
    run = plan.run.model_copy(update={"dir": tmp_path / os.fsdecode(b"runs-\xff")})
    odd = plan.model_copy(update={"run": run})
    with pytest.raises(FolderUnusable, match=r"runs-\\udcff.*UTF-8.*run\.dir"):
        runs.make_folder(odd, "mlp-1")


def test_a_folder_that_cannot_be_made_is_reported(plan):
    (plan.run.dir / "mlp-1").write_text("a file is in the way")
    with pytest.raises(FolderUnusable, match="mlp-1, cannot be made"):
        runs.make_folder(plan, "mlp-1")


def test_a_folder_whose_path_is_too_long_for_the_brokers_records_is_refused_at_once(tmp_path):
    """It was made, and after 33 s the broker said "unable to open database file"."""
    room = LONGEST_PATH - len(os.fsencode(tmp_path.resolve() / "mlp-1" / runs.STORE)) - 1
    middle = "a" * (room // 2 - 1) + "/"
    longest = tmp_path / (middle + "b" * (room - len(middle)))
    plan = read_plan("examples/mlp", sets=[f"run.dir={longest}"], environment={})
    with closing(SqliteStore(runs.make_folder(plan, "mlp-1") / runs.STORE)):
        pass
    with pytest.raises(FolderUnusable, match=rf"mlp-12, .* {LONGEST_PATH + 1} bytes.* run\.dir"):
        runs.make_folder(plan, "mlp-12")
    assert [folder.name for folder in longest.iterdir()] == ["mlp-1"]


def test_the_brokers_address_and_its_secret_are_for_this_user_alone(tmp_path):
    assert runs.read_broker_url(tmp_path) is None
    assert runs.read_control_secret(tmp_path) == b""
    runs.write_broker_url(tmp_path, "tcp://127.0.0.1:5600", b"secret")
    assert runs.read_broker_url(tmp_path) == "tcp://127.0.0.1:5600"
    assert runs.read_control_secret(tmp_path) == b"secret"
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        runs.BROKER: 0o600,
        runs.SECRET: 0o600,
    }
    runs.remove_broker_url(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_result_that_is_damaged_is_reported(tmp_path):
    assert runs.result_in(tmp_path) is None
    (tmp_path / runs.RESULT).write_text("{")
    with pytest.raises(NoSuchRun, match="is not the result of a run"):
        runs.result_in(tmp_path)


def test_a_run_that_is_resumed_is_cut_where_it_was_not_where_it_would_be_measured_now(tmp_path):
    sets = [f"run.dir={tmp_path}", "model.stages=2", "model.balance=time"]
    measured = read_plan("examples/mlp", sets=[*sets, "model.cut=auto"], environment={})
    began = read_plan("examples/mlp", sets=[f"run.dir={tmp_path}", "model.cut=[2]"], environment={})
    assert runs.recorded_cut(measured, begin(began, "mlp-1", 10)) == [2]
    assert runs.recorded_cut(began, tmp_path / "mlp-1") is None
    assert runs.recorded_cut(measured, tmp_path / "mlp-2") is None
