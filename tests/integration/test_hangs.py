"""Workers that end without being killed: they hang in user code, get SIGTERM, or wake up after their replacement."""

import json
import os
import signal
from pathlib import Path

import pytest

from support.fork_server import ForkServer
from support.whole_run import WholeRun, expected, plan_in
from support.workspace import Workspace, free_port, until

HANGS = """
import ctypes
from pathlib import Path

def _sleep(seconds, plain=sleep):
    try:
        (Path(__file__).parent / "hang").unlink()  # one of the workers does, whichever is first
    except FileNotFoundError:
        pass
    else:
        ctypes.PyDLL(None).sleep(100)  # holds the interpreter's lock: no thread of the process gets on
    plain(seconds)

sleep = _sleep
"""

FORKS = """
import os
from pathlib import Path

def _sleep(seconds, plain=sleep):
    fork = Path(__file__).parent / "fork"
    try:
        fork.unlink()
    except FileNotFoundError:
        pass
    else:
        os.fork()
    plain(seconds)

sleep = _sleep
"""


@pytest.mark.slow
@pytest.mark.parametrize("url", ["shm://", "ipc://"])
def test_a_fork_that_comes_back_from_a_forward_ends_and_is_named_with_its_line(
    url: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    """Both processes read from one connection: the run stood still until all workers were given up."""
    plan = plan_in(tmp_path)
    with (plan.parent / "model.py").open("a") as file:
        file.write(FORKS)
    going = WholeRun(fork_server, plan, "run.steps=60", f"queues.url={url}")
    going.until_checkpoint(2)
    (plan.parent / "fork").touch()
    assert going.digest() == expected(60)
    ended = going.end()
    assert ended["facts"]["restarts"] == 0
    logs = "".join(path.read_text() for path in going.folder.glob("worker-*.log"))
    assert "was forked from pid" in logs
    assert f"_sleep ({plan.parent / 'model.py'}, line " in logs


@pytest.mark.slow
def test_a_hang_that_holds_the_interpreter_is_named_within_the_lease_and_replaced(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """A worker that hung so was not killed: its place stayed empty until the run was given up."""
    plan = plan_in(tmp_path)
    with (plan.parent / "model.py").open("a") as file:
        file.write(HANGS)
    going = WholeRun(fork_server, plan, "run.steps=20", "recovery.lease=3")
    going.until_checkpoint(2)
    (plan.parent / "hang").touch()
    why = going.wait_for(lambda: said if "was silent" in (said := going.ask("why")) else None)
    assert "it is declared lost in" in why
    assert "and it is replaced" in why
    assert going.digest() == expected(20)
    assert going.end()["facts"]["restarts"] == 1


@pytest.mark.slow
def test_a_hanging_worker_whose_place_a_spare_has_is_ended(fork_server: ForkServer, tmp_path: Path) -> None:
    """It was not watched any more once its place was taken, and kept its memory until the run was over."""
    plan = plan_in(tmp_path)
    with (plan.parent / "model.py").open("a") as file:
        file.write(HANGS)
    going = WholeRun(fork_server, plan, "run.steps=120", "recovery.lease=3", spares=1)
    going.until_checkpoint(2)
    before = going.pids()
    (plan.parent / "hang").touch()
    (hung,) = going.wait_for(lambda: before - going.pids())
    going.wait_for(lambda: not Path(f"/proc/{hung}").exists())
    assert "tiny: running" in going.ask("status")
    assert going.digest() == expected(120)


@pytest.mark.slow
@pytest.mark.parametrize("spares", [0, 1])
def test_a_worker_that_gets_sigterm_is_replaced_like_one_that_is_killed(
    spares: int, fork_server: ForkServer, tmp_path: Path
) -> None:
    """It ended the whole run, though a machine that is wanted back begins with this signal."""
    going = WholeRun(fork_server, plan_in(tmp_path), "run.steps=60", spares=spares)
    going.until_checkpoint(2)
    os.kill(min(going.pids()), signal.SIGTERM)
    assert going.digest() == expected(60)
    assert going.end()["facts"]["restarts"] == 1


@pytest.mark.slow
def test_a_worker_that_was_stopped_for_longer_than_its_lease_exits_when_it_wakes_up(
    workspace: Workspace, tmp_path: Path
) -> None:
    plan = plan_in(tmp_path)
    options = ("--set", "run.steps=30", "--set", "recovery.lease=2", "--set", f"run.dir={tmp_path}")
    at = f"tcp://127.0.0.1:{free_port()}"
    work = ("worker", str(plan), *options, "--broker", at)
    broker = workspace.start("broker", str(plan), *options, "--bind", at)
    workers = [workspace.start(*work, "--index", str(index), "--patience", "30") for index in (0, 1)]
    until(broker.stderr, "all workers have joined")
    workers[1].send_signal(signal.SIGSTOP)
    until(broker.stderr, "was silent")
    replacement = workspace.start(*work, "--index", "1")
    until(broker.stderr, "computes again")
    workers[1].send_signal(signal.SIGCONT)
    _, errors = workers[1].communicate()
    assert workers[1].returncode == 1
    assert "is not current" in errors or "must stop" in errors  # the broker tells it, or the next worker's queue
    until(broker.stderr, "has finished")
    assert [process.wait() for process in (workers[0], replacement)] == [0, 0]
    broker.send_signal(signal.SIGTERM)  # it would stay for a while, to answer how the run ended
    assert broker.wait() == 0
    (result,) = tmp_path.glob("*/result.json")
    assert json.loads(result.read_text())["weights_sha256"] == expected(30)


LONG = """
class LongText(Exception):
    def __str__(self):
        return "no such corner: " + "\\x1b" * 50_000_000

def _raise(seconds):
    raise LongText

sleep = _raise
"""


@pytest.mark.slow
def test_an_error_with_a_text_of_fifty_megabytes_ends_the_run_with_its_beginning_and_no_worker_is_taken_for_hung(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    plan = plan_in(tmp_path)
    with (plan.parent / "model.py").open("a") as file:
        file.write(LONG)
    outcome = WholeRun(fork_server, plan, "run.steps=20", "recovery.lease=3").end()
    assert outcome["code"] == 1
    assert "LongText: no such corner: \\x1b" in outcome["reason"]
    assert f"{plan.parent / 'model.py'}, line" in outcome["reason"]
    assert len(outcome["reason"]) < 200_000
    assert outcome["facts"]["restarts"] == 0
