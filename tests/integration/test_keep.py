"""`worker --keep`: a kept worker that hangs, dies or is stopped, with real processes."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from stageline.pipeline.errors import ExitCode
from support.leavers import RunWithLeavers
from support.workspace import Command, Workspace, until, wait_for

ALIVE = "alive"


def keeper_of(run: RunWithLeavers, *words: str) -> Command:
    """Keeps worker 1, in place of the one that was started with the run."""
    run.workers[1].kill()
    run.workers[1].wait()
    return run.start("--index", "1", "--keep", *words, cold=True)


def worker_of(keeper: Command) -> psutil.Process:
    """The kept worker, once it has begun."""
    parent = psutil.Process(keeper.pid)
    wait_for(lambda: any("--kept" in each.cmdline() for each in parent.children()))
    return next(each for each in parent.children() if "--kept" in each.cmdline())


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_kept_worker_that_is_stopped_is_killed_and_started_again_to_the_same_bits(workspace: Workspace) -> None:
    run = RunWithLeavers(workspace, "tcp://127.0.0.1:0", **{"recovery.lease": 3.0, "recovery.restarts": 9})
    run.trains_beyond(1)
    keeper = keeper_of(run, "--hung-seconds", "5", "--alive-file", ALIVE)
    first = worker_of(keeper)
    wait_for(lambda: run.is_present(first.pid))
    assert "torch" not in Path(f"/proc/{keeper.pid}/maps").read_text()
    assert psutil.Process(keeper.pid).memory_info().rss < 24 * 2**20
    assert (workspace.folder / ALIVE).exists()
    first.send_signal(signal.SIGSTOP)
    said = until(keeper.stderr, "started again in 1 s")
    assert "hung" in said
    assert gone(first)
    wait_for(lambda: run.is_present(worker_of(keeper).pid))
    run.takes("0")
    run.workers[1] = keeper
    run.ends()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="prlimit")
def test_a_worker_whose_code_hangs_tells_where_and_one_that_cannot_be_started_is_tried_again(
    workspace: Workspace,
) -> None:
    run = RunWithLeavers(
        workspace, "tcp://127.0.0.1:0", **{"recovery.lease": 9.0, "recovery.action": 3.0, "recovery.restarts": 9}
    )
    run.trains_beyond(1)
    keeper = keeper_of(run, "--hung-seconds", "5")
    first = worker_of(keeper)
    wait_for(lambda: run.is_present(first.pid))
    run.takes("600")
    assert "in forward" in until(keeper.stderr, "model.py")
    run.takes("0.005")
    assert "hung" in until(keeper.stderr, "started again in 1 s")
    assert gone(first)
    second = worker_of(keeper)
    wait_for(lambda: run.is_present(second.pid))
    limits = psutil.Process(keeper.pid)
    before = limits.rlimit(psutil.RLIMIT_NOFILE)
    limits.rlimit(psutil.RLIMIT_NOFILE, (3, before[1]))
    second.kill()
    assert "SIGKILL" in until(keeper.stderr, "started again in ")
    assert "Too many open files" in until(keeper.stderr, "cannot be started")
    limits.rlimit(psutil.RLIMIT_NOFILE, before)
    run.takes("0")
    run.workers[1] = keeper
    run.ends()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, ExitCode.LEFT), (signal.SIGINT, ExitCode.INTERRUPTED)], ids=str
)
def test_a_signal_to_the_keeper_ends_both_and_a_killed_keeper_leaves_no_worker(
    workspace: Workspace, number: signal.Signals, code: ExitCode
) -> None:
    run = RunWithLeavers(workspace, "tcp://127.0.0.1:0", **{"recovery.lease": 3.0, "recovery.restarts": 9})
    run.trains_beyond(1)
    keeper = keeper_of(run, "--notice-seconds", "30")
    worker = worker_of(keeper)
    wait_for(lambda: run.is_present(worker.pid))
    os.kill(keeper.pid, number)
    _, stderr = keeper.communicate()
    assert (keeper.returncode, gone(worker)) == (code, True), stderr
    assert f"exit code {int(code)}" in stderr
    another = run.start("--index", "1", "--keep", cold=True)
    orphan = worker_of(another)
    wait_for(lambda: run.is_present(orphan.pid))
    os.kill(another.pid, signal.SIGKILL)
    another.wait()
    wait_for(lambda: gone(orphan))
    run.takes("0")
    run.workers[1] = run.start("--index", "1")
    run.ends()


@pytest.mark.slow
def test_an_end_that_would_be_repeated_is_final_and_one_that_may_pass_is_tried_with_growing_pauses(
    workspace: Workspace,
) -> None:
    at = ("--broker", "tcp://127.0.0.1:9")
    refused = workspace.command("worker", ".", "--keep", *at, "--set", "model.cut=[77]", cold=True)
    assert refused.returncode == ExitCode.REFUSED, refused.stderr
    assert "exit code 78" in refused.stderr
    missing = workspace.start("worker", ".", "--keep", "--patience", "0", *at, cold=True)
    assert "exit code 3" in until(missing.stderr, "started again in 1 s")
    assert "exit code 3" in until(missing.stderr, "started again in 2 s")
    missing.send_signal(signal.SIGTERM)
    assert missing.wait() == ExitCode.INTERRUPTED
    again = workspace.command("worker", ".", "--keep", "--join", "-")
    assert (again.returncode, "@FILE" in again.stderr) == (ExitCode.USAGE, True)


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_no_process_of_its_own_to_the_next(workspace: Workspace) -> None:
    workspace.write("model.py", "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)\n")
    keeper = workspace.start("worker", ".", "--keep", "--broker", "tcp://127.0.0.1:9", cold=True)
    worker = worker_of(keeper)
    wait_for(lambda: bool(worker.children()))
    (left,) = worker.children()
    worker.kill()
    until(keeper.stderr, "started again in 1 s")
    wait_for(lambda: gone(left))
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait() == ExitCode.INTERRUPTED


@pytest.mark.slow
def test_a_worker_that_does_not_exit_after_the_run_is_not_started_again(workspace: Workspace) -> None:
    run = RunWithLeavers(workspace, "tcp://127.0.0.1:0", **{"recovery.lease": 3.0, "recovery.restarts": 9})
    run.trains_beyond(1)
    text = "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    workspace.write("model.py", text + (workspace.folder / "model.py").read_text())
    keeper = keeper_of(run, "--hung-seconds", "5")
    run.takes("0")
    del run.workers[1]
    run.ends()
    said = until(keeper.stderr, "hung")
    assert "the run is over" in said
    assert keeper.wait() == ExitCode.FAILED


@pytest.mark.slow
def test_user_code_that_ends_the_process_with_a_final_status_is_started_again(workspace: Workspace) -> None:
    workspace.write("model.py", "import os\nos._exit(0)\n")
    kept = workspace.start("worker", ".", "--keep", "--broker", "tcp://127.0.0.1:9", cold=True)
    until(kept.stderr, "started again in 1 s")
    kept.send_signal(signal.SIGTERM)
    assert kept.wait() != 0
