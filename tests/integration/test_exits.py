"""A user's code that ends its process, or never returns, is a loss that is named with its line; never a success."""

import json
import os
import signal
from pathlib import Path

import pytest

from support.workspace import Workspace, wait_for

ODD = """
import os, sys
from pathlib import Path
from torch import nn

calls = 0

class Odd(nn.Module):
    def forward(self, x):
        global calls
        calls += 1
        if sys.argv[1] == "worker" and calls > 4:
            {does}
        return x

def build():
    if sys.argv[1] == "worker":
        {loads}
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Odd(), nn.Linear(8, 2))

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()
"""
ONCE = 'Path("once").exists() or (Path("once").touch(), os._exit(0))'
HANGS = "while True: __import__('time').sleep(0.01)"


def train(workspace: Workspace, *sets: str, does: str = "pass", loads: str = "pass", cold: bool = False):
    workspace.write("model.py", ODD.format(does=does, loads=loads))
    return workspace.command("train", ".", "--json", *(word for each in sets for word in ("--set", each)), cold=cold)


def line_of(text: str, **parts: str) -> int:
    code = ODD.format(**{"does": "pass", "loads": "pass", **parts})
    return next(number for number, line in enumerate(code.splitlines(), start=1) if line.strip() == text)


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 78])
def test_a_worker_whose_code_calls_exit_each_time_ends_the_run_as_failed(workspace: Workspace, status: int) -> None:
    """It was taken for one that is done: the run waited a minute, and ended with code 69; or, at 78, with that."""
    exits = f"os._exit({status})"
    ended = train(workspace, "recovery.restarts=2", does=exits)
    assert (ended.returncode, json.loads(ended.stdout)["schema"]) == (1, "error/1")
    place = f"in forward ({workspace.folder}/model.py, line {line_of(exits, does=exits)})"
    assert f"ended without a result (status {status}), {place}" in ended.stderr
    assert "It was replaced 2 times since checkpoint 0 (recovery.restarts is 2)" in ended.stderr


@pytest.mark.slow
def test_a_worker_whose_code_calls_exit_once_is_replaced_and_changes_nothing(workspace: Workspace) -> None:
    undisturbed = json.loads(train(workspace).stdout)
    found = json.loads(train(workspace, does=ONCE).stdout)
    assert found["restarts"] == 1
    assert found["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.slow
def test_a_worker_that_hangs_while_it_loads_is_killed_and_its_line_is_named(workspace: Workspace) -> None:
    ended = train(workspace, "recovery.restarts=1", "recovery.loading=1", loads=HANGS)
    assert ended.returncode == 1
    assert "had not joined within 1 s (recovery.loading)" in ended.stderr
    assert f"in build ({workspace.folder}/model.py, line {line_of(HANGS, loads=HANGS)})" in ended.stderr


@pytest.mark.slow
def test_a_worker_that_hangs_in_an_action_is_named_with_its_line(workspace: Workspace) -> None:
    ended = train(workspace, "recovery.restarts=0", "recovery.action=1", does=HANGS)
    assert ended.returncode == 1
    assert "completed no action for" in ended.stderr
    assert f"is in forward ({workspace.folder}/model.py, line {line_of(HANGS, does=HANGS)})" in ended.stderr


def test_a_run_in_one_process_whose_code_calls_exit_has_failed(workspace: Workspace) -> None:
    exits = "calls > 8 and os._exit(0)"
    workspace.write(
        "model.py",
        ODD.format(does="pass", loads="pass").replace("        return x", f"        {exits}\n        return x"),
    )
    ended = workspace.command("train", ".", "--json", "--set", "queues.url=memory://")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "os._exit(0) was called in forward" in ended.stderr


def left_in(folder: Path) -> list[str]:
    """Files that are there beside those that torch's compiler makes when it is imported."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("torchinductor"))


@pytest.mark.slow
def test_a_killed_train_leaves_nothing_in_the_folder_for_temporary_files(workspace: Workspace) -> None:
    killed = workspace.start("train", ".", "--set", "run.steps=100000", cold=True)
    wait_for(lambda: any("assigned" in log.read_text() for log in workspace.folder.glob("runs/*/worker-1.log")))
    assert left_in(workspace.temporary)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    wait_for(lambda: not workspace.processes())
    assert left_in(workspace.temporary) == []


@pytest.mark.slow
def test_a_killed_worker_that_was_started_by_hand_leaves_nothing_after_the_next_start(workspace: Workspace) -> None:
    sets = ("--set", "queues.url=ipc://", "--set", f"broker.url=ipc://{workspace.temporary}/broker")
    broker = workspace.start("broker", ".", *sets)
    workers = [workspace.start("worker", ".", "--index", str(index), *sets) for index in (0, 1)]
    wait_for(lambda: len(list(workspace.temporary.glob("stageline.*/*/queues"))) == 2)
    for process in (*workers, broker):
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    (workspace.temporary / "broker").unlink()
    assert len(left_in(workspace.temporary)) == 2
    assert workspace.command("train", ".").returncode == 0
    assert left_in(workspace.temporary) == []
