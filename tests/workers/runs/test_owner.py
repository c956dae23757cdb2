"""Whose run it is: as long as the process is there, and how the run goes on without it."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from stageline.pipeline.plan import Plan, read_plan
from stageline.workers.runs import folder as runs
from stageline.workers.runs.owner import RunOwner, StartingRun, read_owner, write_owner


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    sets = [f"run.dir={tmp_path}/runs", "run.steps=20", "broker.url=redis://me:secret@desk:6379/0#a"]
    return read_plan("examples/mlp", sets=sets, environment={"STAGELINE_DATA__BATCH_SIZE": "16"})


def owner_of(folder: Path) -> RunOwner:
    found = read_owner(folder)
    assert found is not None
    return found


def test_the_owner_is_alive_as_long_as_its_process_is_even_if_another_gets_its_number(plan, tmp_path):
    write_owner(tmp_path, plan, "train")
    mine = owner_of(tmp_path)
    assert (mine.pid, mine.alive) == (os.getpid(), True)
    assert not msgspec.structs.replace(mine, started=mine.started - 60).alive
    assert msgspec.structs.replace(mine, host="elsewhere").alive is None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs = msgspec.structs.replace(mine, pid=child.pid, started=psutil.Process(child.pid).create_time())
    assert theirs.alive
    child.communicate()
    assert not theirs.alive


@pytest.mark.parametrize("seconds", [3600.0, -3600.0, 1.0])
def test_the_owner_is_alive_although_the_clock_was_set_since_its_run_began(seconds, plan, tmp_path, monkeypatch):
    """The system tells starts by its present clock: once that was set, a run that went on counted as killed."""
    write_owner(tmp_path, plan, "train")
    mine, booted = owner_of(tmp_path), psutil.boot_time()
    monkeypatch.setattr("psutil._psplatform.boot_time", lambda: booted + seconds)
    assert psutil.Process().create_time() == pytest.approx(mine.started + seconds)
    assert mine.alive
    assert not msgspec.structs.replace(mine, started=mine.started - 60).alive
    assert not msgspec.structs.replace(mine, boot="another").alive


def test_the_command_that_goes_on_names_the_plan_as_it_was_named_but_no_password(plan, tmp_path):
    write_owner(tmp_path, plan, "train")
    words = shlex.split(owner_of(tmp_path).resume("mlp-1"))
    assert words[:3] == ["stageline", "train", "examples/mlp"]
    assert words[-2:] == ["--resume", "mlp-1"]
    assert {"run.steps=20", "data.batch_size=16", f"run.dir={tmp_path}/runs"} <= set(words)
    assert "secret" not in (tmp_path / "process.json").read_text()
    write_owner(tmp_path, plan, "broker")
    assert owner_of(tmp_path).resume("mlp-1").endswith("--run mlp-1 --resume")


def fail_to_start(plan: Plan, resume: str | None) -> None:
    with StartingRun(plan, resume) as starting:
        assert owner_of(plan.run.dir / starting.id).alive
        assert runs.newest_in(plan.run.dir) == plan.run.dir / starting.id
        raise ZeroDivisionError


def test_a_run_that_fails_to_start_leaves_nothing_and_a_resumed_one_what_it_had(plan):
    with pytest.raises(ZeroDivisionError):
        fail_to_start(plan, None)
    assert list(plan.run.dir.iterdir()) == []
    folder = runs.make_folder(plan, "mlp-1")
    (folder / "plan.json").write_text("{}")
    (folder / "process.json").write_text(json.dumps({"kept": "as it was"}))
    with pytest.raises(ZeroDivisionError):
        fail_to_start(plan, "mlp-1")
    assert json.loads((folder / "process.json").read_text()) == {"kept": "as it was"}


def test_a_run_without_the_file_has_no_owner_and_a_damaged_file_is_an_error(tmp_path):
    assert read_owner(tmp_path) is None
    (tmp_path / "process.json").write_text('{"pid": ')
    with pytest.raises(ValueError, match="truncated"):
        read_owner(tmp_path)


def test_what_is_prepared_may_go_on_as_another_run_and_leaves_the_first_as_it_was(plan):
    first, other = plan.run.dir / "mlp-1", plan.run.dir / "mlp-1-at40-5fa0c1"
    for folder in (first, other):
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text("{}")
    (first / "process.json").write_text("of before")
    with StartingRun(plan, "mlp-1") as starting:
        starting.move_to(other.name)
        assert (first / "process.json").read_text() == "of before"
        assert owner_of(other).alive
    assert owner_of(other).alive
