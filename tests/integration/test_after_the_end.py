"""A run is told from its folder after all its processes are gone, whatever they died of, and before they begin."""

import json
import os
import shlex
import shutil
import signal
from contextlib import closing
from pathlib import Path

import pytest

from stageline.broker.control.sqlite_store import SqliteReader
from stageline.broker.coordinator.records import OBSERVED
from support.redis_server import RedisServer
from support.workspace import MODEL, Workspace, free_port, until, wait_for

RECOVERY = ("--set", "recovery.restarts=3", "--set", "recovery.snapshot_every=20")
ENDLESS = ("--set", "run.steps=200000")
NO_REPORT: dict = {"puts": {}}
STAYS = """
import time
from pathlib import Path

def build():
    Path("loading").touch()
    while True:
        time.sleep(0.01)
"""
FAILS = """
calls = []

def loss(outputs, targets):
    calls.append(1)
    return outputs.sum() / (0 if len(calls) > 9 else 1)
"""


def told(workspace: Workspace, capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    """JSON that a command prints."""
    capsys.readouterr()
    code = workspace.here(*words, "--json")
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return json.loads(printed.out)


def start_and_kill(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of a run all of whose processes were killed in the middle of it."""
    train = workspace.start("train", ".", *ENDLESS, *RECOVERY)
    wait_for(lambda: list(workspace.folder.glob("runs/*/process.json")) != [])
    wait_for(lambda: (told(workspace, capsys, "status")["checkpoint"] or 0) >= 20)
    wait_for(
        lambda: all((member["report"] or NO_REPORT)["puts"] for member in observed(workspace.runs()[-1])["members"])
    )
    kill_all(workspace)
    train.wait()
    return workspace.runs()[-1]


def observed(folder: Path) -> dict:
    """Records of the workers' reports that the broker kept about a second ago."""
    with closing(SqliteReader(folder / "broker.sqlite")) as reader:
        return reader.load().facts.get(OBSERVED, {"members": [{"report": NO_REPORT}]})


def kill_all(workspace: Workspace) -> None:
    for pid in workspace.processes():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not workspace.processes())
    for left in workspace.temporary.iterdir():  # a killed train cannot remove its sockets
        shutil.rmtree(left)


@pytest.mark.slow
def test_a_run_of_which_all_was_killed_tells_how_far_it_came_and_goes_on_by_the_command_it_names(workspace, capsys):
    folder = start_and_kill(workspace, capsys)
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    status = told(workspace, capsys, "status")
    assert (status["schema"], status["run"], status["source"]) == ("status/1", folder.name, "records")
    assert (status["phase"], status["state"]) == ("killed", "killed")
    steps, checkpoint = status["finished_floor"], status["checkpoint"]
    assert steps >= checkpoint >= 20
    assert [row["name"] for row in status["workers"]] == ["worker-0", "worker-1"]
    assert all(row["now"] for row in status["workers"])  # their last reports
    words = f"at step {steps} of 200000; checkpoint {checkpoint} is complete"
    assert status["reason"] == f"the run was killed or lost its machine {words}"
    why = told(workspace, capsys, "why", str(folder))
    assert (why["text"], why["chain"]) == (status["reason"], [])
    queues = told(workspace, capsys, "queue", "ls")["queues"]
    assert {row["queue"] for row in queues if row["put"]} == {"forward-1", "backward-0"}
    story = told(workspace, capsys, "story", f"{checkpoint - 1}/1")
    assert [stage["state"] for stage in story["stages"]] == ["done", "done"]
    assert all(stage["actions"] for stage in story["stages"])
    (row,) = told(workspace, capsys, "run", "ls")["runs"]
    assert (row["state"], row["steps"], row["checkpoint"], row["total"]) == ("killed", steps, checkpoint, 200000)
    assert workspace.here("story", "9999999/1") == 2
    assert "ask for 0 to 199999" in capsys.readouterr().err
    after = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    assert after == before  # nothing was written by asking

    _, _, *command = shlex.split(why["action"].removeprefix("go on with: "))
    assert sorted(command) == sorted([".", *ENDLESS, *RECOVERY, "--resume", folder.name])
    train = workspace.start("train", *command)
    assert told(workspace, capsys, "run", "ls")["runs"][-1]["run"] == folder.name
    until(train.stderr, "running")
    train.send_signal(signal.SIGINT)
    train.communicate()
    assert train.returncode == 75
    stopped = told(workspace, capsys, "status")
    assert (stopped["phase"], stopped["state"], stopped["code"]) == ("failed", "stopped", 75)
    assert stopped["finished_floor"] >= checkpoint
    assert told(workspace, capsys, "why")["action"] == why["action"]


def test_a_damaged_record_of_a_killed_run_is_named(workspace, capsys):
    folder = workspace.folder / "runs" / "small-1"
    broker = workspace.start("broker", ".", "--bind", f"tcp://127.0.0.1:{free_port()}", "--run", "small-1")
    until(broker.stderr, "broker at")
    broker.send_signal(signal.SIGINT)
    broker.communicate()
    for name in ("broker.sqlite", "plan.json", "process.json"):
        kept = (folder / name).read_bytes()
        for content in (kept[: len(kept) // 3], b"\xff" * 300):
            (folder / name).write_bytes(content)
            for words in (("status",), ("why",), ("queue", "ls"), ("story", "0/0")):
                assert workspace.here(*words, str(folder)) == 1
                said = capsys.readouterr().err
                assert name in said
                assert "Traceback" not in said
            (row,) = told(workspace, capsys, "run", "ls")["runs"]
            assert row["state"] == "damaged"
            assert name in row["reason"]
        (folder / name).write_bytes(kept)
    (folder / "checkpoints").mkdir()
    (folder / "broker.sqlite").write_bytes(b"")
    assert workspace.here("status", str(folder)) == 1
    assert "broker.sqlite holds no records, although the run has snapshots" in capsys.readouterr().err
    (folder / "broker.sqlite").unlink()
    assert workspace.here("status", str(folder)) == 1
    (folder / "checkpoints").rmdir()
    assert "before it began" in told(workspace, capsys, "status")["reason"]


def test_a_run_shows_as_starting_from_the_first_moment_on_and_not_the_one_before(workspace, capsys):
    assert workspace.here("train", ".", "--set", "queues.url=memory://") == 0
    (finished,) = workspace.runs()
    workspace.write("model.py", MODEL.replace("def build", "def unused") + STAYS)
    train = workspace.start("train", ".")
    wait_for((workspace.folder / "loading").exists)
    status = told(workspace, capsys, "status")
    assert (status["phase"], status["source"]) == ("starting", "records")
    assert status["run"] != finished.name
    assert told(workspace, capsys, "why")["action"] == "wait"
    assert [row["state"] for row in told(workspace, capsys, "run", "ls")["runs"]] == ["finished", "starting"]
    kill_all(workspace)
    train.wait()
    assert told(workspace, capsys, "status")["phase"] == "killed"
    assert "before it began" in told(workspace, capsys, "why")["text"]
    assert told(workspace, capsys, "status", str(finished))["phase"] == "finished"


@pytest.mark.parametrize("url", ["memory://", pytest.param("ipc://", marks=pytest.mark.slow)])
def test_a_run_that_failed_tells_why_and_who(url, workspace, capsys):
    workspace.write("model.py", MODEL + FAILS)
    failed = workspace.command(
        "train", ".", "--set", f"queues.url={url}", "--set", "model.loss=model.py:loss", "--json"
    )
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["schema"] == "error/1"
    why = told(workspace, capsys, "why")
    assert (why["phase"], why["state"], why["source"]) == ("failed", "failed", "records")
    assert "stage 1" in why["text"]
    assert why["text"].splitlines()[0] in failed.stderr
    assert "correct the cause" in why["action"]
    (row,) = told(workspace, capsys, "run", "ls")["runs"]
    assert (row["state"], row["reason"]) == ("failed", why["text"])


@pytest.mark.slow
def test_a_run_whose_records_are_at_a_redis_server_is_told_from_there(workspace, capsys):
    with RedisServer() as server:
        store = ("--set", f"broker.store={server.url}")
        trained = workspace.command("train", ".", "--json", *store)
        assert trained.returncode == 0, trained.stderr
        status = told(workspace, capsys, "status")
        assert (status["source"], status["result"]) == ("records", json.loads(trained.stdout))
        assert [stage["state"] for stage in told(workspace, capsys, "story", "5/2")["stages"]] == ["done", "done"]
        assert told(workspace, capsys, "run", "ls")["runs"][0]["state"] == "finished"
        server.kill()
        assert workspace.here("status") == 1
        assert "cannot be reached" in capsys.readouterr().err
