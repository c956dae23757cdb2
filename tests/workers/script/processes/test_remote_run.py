"""A user's script whose workers are started in a folder of their own, as on other machines, and join it."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from stageline.workers.errors import RunFailed
from stageline.workers.runtime.calls import Position
from stageline.workers.script.processes.remote_run import PositionFile, RemoteRun
from support.fork_server import ForkServer
from support.machines import line_in
from support.paths import EXAMPLES, TESTS
from support.redis_server import RedisServer, shared_server
from support.reference import reference_digest
from support.workspace import Command, Workspace, free_port, until, wait_for

SCRIPT = TESTS / "support" / "script"


@contextmanager
def another_machine(folder: Path, fork_server: ForkServer) -> Iterator[Workspace]:
    """A folder with the script's files, but not the script."""
    folder.mkdir()
    with Workspace(folder, fork_server) as there:
        shutil.copy(SCRIPT / "net.py", folder)
        yield there


@pytest.fixture
def there(tmp_path: Path, fork_server: ForkServer, stack: ExitStack) -> Workspace:
    return stack.enter_context(another_machine(tmp_path / "there", fork_server))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> dict[str, Any]:
    with Workspace(tmp_path_factory.mktemp("inline"), fork_server) as workspace:
        return result(start(workspace, "inline"))


def start(workspace: Workspace, *arguments: str, **environment: str) -> Command:
    return workspace.start("script", str(SCRIPT / "train.py"), *arguments, **environment)


def result(script: Command) -> dict[str, Any]:
    said, errors = script.communicate()
    assert script.returncode == 0, errors
    return dict(json.loads(said.splitlines()[-1]))


def join(there: Workspace, address: str) -> list[Command]:
    return [there.start("worker", "--join", address) for _ in range(2)]


@pytest.mark.slow
def test_workers_that_join_by_the_line_compute_what_the_script_does_inline_also_one_that_comes_back_with_a_new_key(
    workspace: Workspace, there: Workspace, undisturbed: dict[str, Any]
) -> None:
    os.mkfifo(workspace.folder / "gate")
    script = start(workspace, f"tcp://0.0.0.0:{free_port()}", "gate", "12")
    line = line_in(until(script.stderr, "waiting for workers 0 and 1")).text
    workers = join(there, line)
    until(script.stdout, "at step 12")
    workers.pop().kill()
    assert "; its replacement begins at step " in until(script.stderr, "stageline: worker ")
    assert line_in(until(script.stderr, "stageline: waiting for worker ")).text == line
    there.key.unlink()  # as on a machine that was set up again
    workers.append(there.start("worker", "--join", line))
    (workspace.folder / "gate").write_text("")
    assert result(script) == undisturbed
    assert [worker.wait() for worker in workers] == [0, 0]
    (folder,) = there.runs()
    assert "plan.json" not in os.listdir(folder)  # that of a run that can be resumed there


@pytest.mark.slow
def test_over_a_redis_server_all_dial_out(workspace: Workspace, there: Workspace, undisturbed: dict[str, Any]) -> None:
    server = shared_server()
    address = server.tcp_url_of(server.own_number())
    workers = join(there, address)
    assert result(start(workspace, address)) == undisturbed
    assert [worker.wait() for worker in workers] == [0, 0]


@pytest.mark.slow
def test_the_broker_is_killed_and_the_script_is_killed_and_resumed(
    workspace: Workspace, there: Workspace, undisturbed: dict[str, Any]
) -> None:
    server = shared_server()
    address = server.tcp_url_of(server.own_number())
    workers = join(there, address)
    assert result(start(workspace, address, "kill", "broker", "8")) == undisturbed
    assert [worker.wait() for worker in workers] == [0, 0]

    address = f"tcp://127.0.0.1:{free_port()}"
    workers = join(there, address)
    script = start(workspace, address, "kill", "script", "13")
    script.communicate()
    assert script.returncode == -signal.SIGKILL
    assert [worker.wait() for worker in workers] == [75, 75]  # the run was stopped, with its newest checkpoint
    workers = join(there, address)
    resumed = result(start(workspace, address, "resume"))
    assert resumed["first"] in (5, 10)  # by how far its workers came
    assert resumed["losses"] == undisturbed["losses"][resumed["first"] :]
    assert (resumed["weights"], resumed["averages"]) == (undisturbed["weights"], undisturbed["averages"])
    assert [worker.wait() for worker in workers] == [0, 0]


@pytest.mark.slow
def test_a_run_that_is_stopped_while_the_script_computes_goes_on_after_its_last_step(
    workspace: Workspace, there: Workspace, undisturbed: dict[str, Any]
) -> None:
    """It went on at step 5 or 10: the launcher, which has no workers, did not wait for those on other machines."""
    address = f"tcp://127.0.0.1:{free_port()}"
    os.mkfifo(workspace.folder / "gate")
    workers = join(there, address)
    script = start(workspace, address, "gate", "12", PATIENCE="20s")  # there are snapshots of every 5 steps
    until(script.stdout, "at step 12")
    (launcher,) = psutil.Process(script.pid).children()
    launcher.terminate()
    assert [worker.wait() for worker in workers] == [75, 75]
    (folder,) = workspace.runs()
    wait_for(lambda: "12" in json.loads((folder / "positions.json").read_text()))
    script.kill()
    script.communicate()
    wait_for(lambda: not workspace.processes())
    workers = join(there, address)
    resumed = result(start(workspace, address, "resume"))
    assert (resumed["first"], resumed["losses"]) == (12, undisturbed["losses"][12:])
    assert (resumed["weights"], resumed["averages"]) == (undisturbed["weights"], undisturbed["averages"])
    assert [worker.wait() for worker in workers] == [0, 0]


@pytest.mark.slow
def test_a_server_that_does_not_let_the_launcher_in_is_the_cause_that_the_script_is_told(workspace: Workspace) -> None:
    """The script was told that its launcher had ended without a result, with the last line of a traceback."""
    with RedisServer() as server:
        server.client().config_set("requirepass", "open sesame")
        script = start(workspace, server.url)
        _, said = script.communicate()
    failed = said.splitlines()[-1]
    assert failed.startswith("stageline.workers.errors.RunFailed: ")
    assert all(fact in failed for fact in (server.url, "Authentication required", "redis://user:password@"))
    assert "launcher" not in failed.partition(" (the logs are in ")[0]


@pytest.mark.slow
def test_a_worker_with_other_code_says_which_and_so_does_the_script_with_which_worker_is_missing(
    workspace: Workspace, there: Workspace
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    there.write("net.py", "")
    worker = there.start("worker", "--join", address)
    until(worker.stderr, "waiting for the script's broker")  # from now on it asks all the time
    script = start(workspace, address, PATIENCE="3s")
    _, errors = worker.communicate()
    differs = "net.py differs (SHA-256 e3b0c44298fc here, "
    assert differs in errors
    _, said = script.communicate()
    (told,) = (line for line in said.splitlines() if line.startswith("stageline: a worker (process "))
    assert differs in told
    failed = said.splitlines()[-1]
    assert "RunFailed: workers 0 and 1 did not join within 3 s (broker.patience); a worker (process " in failed
    assert differs in failed


def ending_run(folder: Path, fail: RunFailed, ends: Mock) -> RemoteRun:
    """A run whose calls fail, and whose positions cannot be written."""
    (folder / "run").write_text("a file in place of the folder")
    run = RemoteRun.__new__(RemoteRun)
    run._positions = PositionFile(folder / "absent", every=5)
    run._positions._file = folder / "run" / "positions.json"
    run._positions.note(Position(1, 1, 0))
    run._stack, run._open = ExitStack(), Mock()
    run._stack.callback(ends)
    run._control = run._assigned = run._processes = run._plan = Mock()
    run._driver = Mock(**{"submit.side_effect": fail, "leave.return_value": 7})
    run.batches = None
    return run


def test_a_run_whose_positions_cannot_be_written_and_one_that_fails_in_close_end_all_the_same(tmp_path: Path) -> None:
    fail, ends = RunFailed("stopped with step 7 saved", 75, tmp_path), Mock()
    aborted = ending_run(tmp_path, fail, ends)
    aborted.abort("ValueError")  # the user's, which goes on afterwards
    ends.assert_called_once()
    assert aborted._open.detach.called
    assert aborted._control.send.called  # type: ignore[attr-defined]
    closed = ending_run(tmp_path, fail, ends)
    with pytest.raises(RunFailed, match="step 7"):
        closed.close()
    assert ends.call_count == 2
    assert closed._open.detach.called


@pytest.mark.slow
def test_digits_on_two_machines_and_from_a_plan_have_one_digest(workspace: Workspace, there: Workspace) -> None:
    example, server = EXAMPLES / "two_machines", shared_server()
    address = server.tcp_url_of(server.own_number())
    shutil.copy(example / "model.py", there.folder)
    workers = join(there, address)
    run = workspace.command("script", str(example / "train.py"), address, "2")
    assert run.returncode == 0, run.stderr
    assert "epoch 2: loss" in run.stdout
    (folder,) = workspace.runs()
    found = json.loads((folder / "result.json").read_text())["weights_sha256"]
    assert found == reference_digest(EXAMPLES / "digits", steps=46)
    assert [worker.wait() for worker in workers] == [0, 0]
