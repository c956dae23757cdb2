"""The processes of a script's run: forks that have its closures, and that are gone however the script ends. Real ones.

The runs take their batches from a data source, so that they go on without the script.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from torch import nn

from stageline.pipeline.errors import ExitCode
from stageline.pipeline.process.lifeline import LifelineOwner
from stageline.workers.control.client import Client
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import LaunchOutcome
from stageline.workers.runs.owner import read_owner
from stageline.workers.runs.records import recorded_run
from stageline.workers.script.processes.launcher import LOG, LocalProcesses, NotStarted
from stageline.workers.script.processes.launcher_report import LauncherReport
from stageline.workers.script.processes.process_run import ProcessRun
from support.paths import importing_tests
from support.script_runs import DATA, Barrier, Closures, Script, plan_of, start, told
from support.workspace import Workspace

STEPS = 8
OF_SCRIPT = {"source": "script:batches", "batch_size": 3}
AT = 14  # calls of the loss: in step 4, of 3 microbatches each


@pytest.fixture
def run_script(workspace: Workspace, stack: ExitStack) -> Callable[[Callable[[], object]], Script]:
    workspace.write("data.py", DATA)

    def run(function: Callable[[], object]) -> Script:
        script = Script(function, workspace.folder, workspace.temporary)
        stack.callback(script.close)
        return script

    return run


@pytest.fixture
def gated(workspace: Workspace, run_script: Callable[[Callable[[], object]], Script]) -> tuple[Script, Barrier]:
    """A script whose run waits at a gate in step 4, and the gate."""
    gate = Barrier(workspace.folder, AT)

    def script() -> object:
        with start(Closures(gate), plan_of(STEPS)) as processes:
            return told(processes.wait(60))

    return run_script(script), gate


def await_end(workspace: Workspace, *pids: int) -> None:
    """Until no process of the script is left, but for `pids`; the test's time limit is the bound."""
    while set(workspace.processes()) - {*pids}:
        os.sched_yield()


def await_checkpoint(workspace: Workspace) -> None:
    """Until one is complete; the test's time limit is the bound."""
    complete = 0
    while not complete:
        with recorded_run(workspace.folder / "runs" / "script-1") as run:
            complete = run.complete


def test_a_run_with_a_scripts_closures_ends_as_a_plain_loop_does(workspace, run_script):
    expected = Closures().digest(STEPS, workspace.folder)  # first: what this imports, the forks need not import

    def script() -> object:
        with start(Closures(), plan_of(STEPS)) as processes:
            return told(processes.wait(60))

    found = run_script(script).result()
    folder = workspace.folder / "runs" / "script-1"
    assert found["digest"] == expected
    assert (found["code"], found["children"], found["threads"]) == (0, 0, 1)
    assert {each.name for each in folder.glob("*.log")} == {
        "broker.log",
        "launcher.log",
        "worker-0.log",
        "worker-1.log",
    }
    assert runs.result_in(folder).weights_sha256 == found["digest"]
    assert read_owner(folder).command == "script"
    await_end(workspace)


def test_a_worker_that_is_killed_is_replaced_by_one_with_the_closures(workspace, gated):
    running, gate = gated
    worker = gate.await_worker()
    gate.leave_open()
    os.kill(worker, signal.SIGKILL)
    found = running.result()
    assert (found["code"], found["restarts"]) == (0, 1)
    assert found["digest"] == Closures().digest(STEPS, workspace.folder)


@pytest.mark.slow
def test_a_run_goes_on_without_its_script_and_leaves_nothing(workspace, run_script):
    gate = Barrier(workspace.folder, AT)

    def script() -> object:
        return told(start(Closures(gate), plan_of(STEPS)).wait(60))

    running = run_script(script)
    gate.await_worker()
    running.close()
    gate.open()
    await_end(workspace)
    result = runs.result_in(workspace.folder / "runs" / "script-1")
    assert result.weights_sha256 == Closures().digest(STEPS, workspace.folder)


@pytest.mark.slow
def test_a_run_whose_script_is_gone_before_it_has_joined_ends_and_leaves_nothing(workspace, run_script):
    barrier = Barrier(workspace.folder, 1)

    def build() -> nn.Sequential:
        barrier.pass_through()
        return nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))

    def script() -> object:
        closures = Closures()
        closures.model = build
        plan = plan_of(None, model={"factory": "script:model", "cut": [1], "loss": "script:loss"}, data=OF_SCRIPT)
        return start(closures, plan).wait(60)

    running = run_script(script)
    barrier.await_worker()
    running.close()
    barrier.open()
    await_end(workspace)
    with recorded_run(workspace.folder / "runs" / "script-1") as run:
        assert run.outcome.reason.startswith("the script has ended before it joined")


@pytest.mark.slow
def test_a_script_may_begin_another_run_after_the_first(workspace, run_script):
    """This process has had connections by then, and threads for them."""

    def script() -> object:
        with start(Closures(), plan_of(2), "script-1") as processes, Client(processes.broker) as client:
            client.ask("status", timeout=60.0)
            first = told(processes.wait(60))
        with start(Closures(), plan_of(4), "script-2") as processes:
            return [first["digest"], told(processes.wait(60))["digest"]]

    found = run_script(script).result()
    assert found == [Closures().digest(steps, workspace.folder) for steps in (2, 4)]


@pytest.mark.slow
def test_without_its_template_a_run_goes_on_until_it_needs_another_process(workspace, gated):
    running, gate = gated
    worker = gate.await_worker()
    await_checkpoint(workspace)
    template = running.template()
    template.kill()
    os.kill(worker, signal.SIGKILL)
    found = running.result()
    expected = (
        f"worker 1 cannot be started again: the process that has the script's model and functions (pid {template.pid}) "
        "was killed by SIGKILL, and no other has them; the state after "
    )
    assert found["code"] == ExitCode.SAVED
    assert found["reason"].startswith(expected)
    await_end(workspace)


@pytest.mark.slow
def test_a_run_whose_template_was_killed_finishes_if_nothing_else_is_lost(workspace, gated):
    running, gate = gated
    gate.await_worker()
    running.template().kill()
    gate.open()
    assert running.result()["digest"] == Closures().digest(STEPS, workspace.folder)


@pytest.mark.slow
def test_a_killed_launcher_leaves_nothing_and_is_named(workspace, gated):
    running, gate = gated
    gate.await_worker()
    launcher = running.launcher()
    launcher.kill()
    found = running.result()
    assert found["code"] == ExitCode.FAILED
    assert f"the launcher of the run (pid {launcher.pid}) was killed by SIGKILL" in found["reason"]
    gate.open()
    await_end(workspace)


@pytest.mark.slow
def test_leaving_the_context_ends_the_run(workspace, run_script):
    gate = Barrier(workspace.folder, AT)

    def script() -> object:
        with start(Closures(gate), plan_of(10**6)) as processes:
            gate.await_worker()
            gate.open()
        return told(processes.poll())

    found = run_script(script).result()
    assert found["code"] == ExitCode.SAVED
    assert found["reason"].startswith("interrupted; the state after ")
    assert (found["children"], workspace.processes()) == (0, [])


@pytest.mark.slow
def test_ctrl_c_reaches_the_script_alone(workspace, run_script):
    gate = Barrier(workspace.folder, AT)

    def script() -> object:
        processes = start(Closures(gate), plan_of(STEPS))
        try:
            return processes.wait(60)
        except KeyboardInterrupt:
            gate.open()
            return told(processes.wait(60))

    running = run_script(script)
    gate.await_worker()
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.result()["code"] == 0


@pytest.mark.slow
def test_what_the_script_computed_in_parallel_before_does_no_harm(workspace, run_script):
    """A fork by the thread that had computed in parallel waited for ever once it computed in parallel."""

    def script() -> object:
        import torch

        torch.set_num_threads(2)
        x = torch.randn(512, 512, requires_grad=True)
        (x @ x).exp().sum().backward()
        workers = {str(index): {"stages": [index], "threads": 2} for index in (0, 1)}
        with start(Closures(width=2**15), plan_of(2, workers=workers)) as processes:
            return told(processes.wait(60))

    found = run_script(script).result()
    assert (found["code"], found["children"]) == (0, 0), found["reason"]


def test_what_the_launcher_has_said_counts_although_it_was_read_before_its_end(tmp_path):
    """It was forgotten, and a run that had ended well was said to have lost its launcher."""
    launcher = SimpleNamespace(returncode=None, poll=lambda: launcher.returncode)
    with tempfile.TemporaryFile() as file:
        report = LauncherReport(os.dup(file.fileno()))
    processes = LocalProcesses(launcher, report, LifelineOwner(), tmp_path)
    report.write(LaunchOutcome(0, "all steps are done", {"steps": 3}))
    assert processes.poll() is None
    launcher.returncode = 0
    assert processes.poll() == LaunchOutcome(0, "all steps are done", {"steps": 3})


def test_a_run_whose_launcher_was_killed_fails_for_that_reason_though_a_worker_tells_of_it_first(tmp_path):
    launcher = SimpleNamespace(pid=7, returncode=-9, poll=lambda: launcher.returncode)
    with tempfile.TemporaryFile() as file:
        report = LauncherReport(os.dup(file.fileno()))
    (tmp_path / LOG).touch()
    run = SimpleNamespace(_processes=LocalProcesses(launcher, report, LifelineOwner(), tmp_path), folder=tmp_path)
    told = ProcessRun._failure(run, "worker 1 failed: the process that started this worker is gone", 1)
    assert "the launcher of the run (pid 7) was killed by SIGKILL" in str(told)
    assert "worker 1" not in str(told)


def test_a_run_that_its_launcher_refuses_is_refused_when_it_begins(workspace, run_script):
    def script() -> object:
        workers = {"0": {"stages": [0], "device": "cuda:0"}, "1": {"stages": [1]}}
        with (
            patch("torch.cuda._is_in_bad_fork", return_value=True),
            pytest.raises(NotStarted, match="no worker can use cuda:0"),
        ):
            start(Closures(), plan_of(STEPS, workers=workers))
        return os.listdir("runs")

    assert run_script(script).result() == []


def test_a_launcher_that_hangs_is_ended_and_leaves_no_run(workspace, run_script):
    def script() -> object:
        os.register_at_fork(after_in_child=signal.pause)
        LocalProcesses.await_start.__defaults__ = (0.2,)
        try:
            start(Closures(), plan_of(STEPS))
        except NotStarted as error:
            return [str(error), len(os.listdir("runs")), threading.active_count()]

    error, left, threads = run_script(script).result()
    assert error.endswith("has started no process within 0.2 s [SL511]")
    assert (left, threads) == (0, 1)
    await_end(workspace)


WHOLE = """
import torch
from stageline.pipeline.model.object_names import OBJECTS
from stageline.pipeline.plan import from_mapping
from stageline.workers.runs.folder import LaunchOutcome
from stageline.workers.script.processes.launcher_report import LauncherReport
from stageline.workers.script.processes.launcher import start_processes

OBJECTS["model"] = lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
OBJECTS["loss"] = lambda x, y: torch.nn.functional.cross_entropy(x, y)
OBJECTS["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
plan = from_mapping({
    "run": {"name": "script", "steps": 2},
    "model": {"factory": "script:model", "cut": [1], "loss": "script:loss"},
    "data": {"source": "data.py:batches", "batch_size": 6},
    "optimizer": {"factory": "script:optimizer"},
})
print("only once")
with start_processes(plan, "script-1") as processes:
    outcome = processes.wait(60)
open("ended", "w").write(repr(outcome))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script.py", "-c", "closed"])
def test_a_script_needs_no_main_guard_and_no_streams(how, workspace):
    workspace.write("script.py", WHOLE)
    arguments = ["-c", WHOLE] if how == "-c" else ["script.py"]
    command = [sys.executable, *arguments]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"] if how == "closed" else []
    done = subprocess.run(
        [*closed, *command],
        cwd=workspace.folder,
        env={**importing_tests(), "TMPDIR": str(workspace.temporary)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("" if how == "closed" else "only once\n")
    assert "code=0" in (workspace.folder / "ended").read_text()
