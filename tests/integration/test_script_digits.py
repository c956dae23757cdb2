"""digits from a script, for 20 epochs: one digest, the plan's, wherever its workers are and whatever is killed."""

import os
import shutil
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.fork_server import ForkServer
from support.paths import EXAMPLES, TESTS
from support.redis_server import shared_server
from support.reference import reference_digest
from support.workspace import Command, Workspace, free_port, until

PLACES = ("inline", "processes", "tcp", "redis")
VICTIMS = ("nothing", "worker", "broker", "script")
TRIALS = [(place, victim) for place in PLACES for victim in VICTIMS if place != "inline" or victim == "nothing"]


@pytest.fixture
def there(tmp_path: Path, fork_server: ForkServer) -> Iterator[Workspace]:
    """Another machine: a folder with the model, but not the script."""
    folder = tmp_path / "there"
    folder.mkdir()
    with Workspace(folder, fork_server) as there:
        shutil.copy(EXAMPLES / "two_machines" / "model.py", folder)
        yield there


@cache
def planned() -> str:
    return reference_digest(EXAMPLES / "digits")


@pytest.mark.sweep
@pytest.mark.parametrize(("place", "victim"), TRIALS)
def test_digits_from_a_script_ends_in_the_plans_digest(
    place: str, victim: str, workspace: Workspace, there: Workspace
) -> None:
    shutil.copy(TESTS / "support" / "script" / "digits.py", workspace.folder)
    shutil.copy(EXAMPLES / "two_machines" / "model.py", workspace.folder)
    address = address_of(place)
    workers = join(there, address)
    script = workspace.start("script", "digits.py", address)
    until(script.stdout, "epoch 7:")
    match victim:
        case "worker" if workers:
            workers.pop().kill()
            workers += join(there, address, 1)
        case "worker":
            os.kill(process_of(workspace, "worker-1"), signal.SIGKILL)
        case "broker":
            os.kill(process_of(workspace, "broker"), signal.SIGKILL)
        case "script":
            script.kill()
            script.communicate()
            assert {worker.wait() for worker in workers} <= {75}
            wait_until_left(workspace)
            workers = join(there, address)
            script = workspace.start("script", "digits.py", address, "resume")
    said, errors = script.communicate()
    assert script.returncode == 0, errors
    assert said.splitlines()[-1] == planned()
    assert {worker.wait() for worker in workers} <= {0}


def address_of(place: str) -> str:
    match place:
        case "tcp":
            return f"tcp://127.0.0.1:{free_port()}"
        case "redis":
            server = shared_server()
            return server.tcp_url_of(server.own_number())
        case _:
            return place


def join(there: Workspace, address: str, count: int = 2) -> list[Command]:
    return [there.start("worker", "--join", address) for _ in range(count if "://" in address else 0)]


def process_of(workspace: Workspace, name: str) -> int:
    """The pid of the run's process with that log."""
    (run,) = workspace.runs()
    (found,) = [pid for pid in workspace.processes() if Path(f"/proc/{pid}/fd/2").readlink() == run / f"{name}.log"]
    return found


def wait_until_left(workspace: Workspace) -> None:
    """Until none of the script's processes is left; the test's time limit is the bound."""
    while workspace.processes():
        os.sched_yield()
