"""A run of the tiny plan on machines that share no disk: each has a folder, which may be lost with all in it."""

import json
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stageline.workers.control.client import Client
from stageline.workers.runs import folder as runs
from support.fork_server import ForkServer
from support.whole_run import TINY
from support.workspace import Command, Workspace, wait_for

RUN = "apart"


class ApartRun:
    """A broker and workers, each in a folder of its own, with `sets` of the plan."""

    def __init__(self, home: Path, fork_server: ForkServer, stack: ExitStack, *sets: str) -> None:
        self._home, self._fork_server, self._stack = home, fork_server, stack
        self._sets = tuple(word for each in sets for word in ("--set", each))
        self.desk = self.machine("desk")
        self.broker = self._start_broker()

    def _start_broker(self, *options: str) -> Command:
        address = "--set", "broker.url=tcp://127.0.0.1:0"
        broker = self.desk.start("broker", ".", "--run", RUN, *options, *address, *self._sets)
        wait_for(lambda: self.address is not None)
        return broker

    def resume(self, *options: str) -> None:
        """Starts another broker, which resumes the run as a whole."""
        (self.folder / runs.BROKER).unlink()
        self.broker = self._start_broker("--resume", *options)

    @property
    def folder(self) -> Path:
        return self.desk.folder / "runs" / RUN

    @property
    def address(self) -> str | None:
        return runs.read_broker_url(self.folder) if self.folder.exists() else None

    def machine(self, name: str) -> Workspace:
        """A folder with the plan, on which a worker may run."""
        folder = self._home / name
        shutil.copytree(TINY, folder)
        return self._stack.enter_context(_TinyWorkspace(folder, self._fork_server))

    def worker(self, machine: Workspace, index: int, *sets: str) -> Command:
        own = (word for each in sets for word in ("--set", each))
        return machine.start("worker", ".", "--index", str(index), "--broker", str(self.address), *self._sets, *own)

    def status(self) -> dict[str, Any]:
        with Client(str(self.address), lambda: runs.read_control_secret(self.folder)) as client:
            return client.ask("status", 20.0)

    def until_checkpoint(self, step: int) -> None:
        wait_for(lambda: (self.status()["checkpoint"] or 0) >= step)

    def lose(self, machine: Workspace, *workers: Command) -> None:
        """Kills the workers of a machine, and deletes its folder of runs and its sockets."""
        for worker in workers:
            worker.kill()
            worker.wait()
        shutil.rmtree(machine.folder / "runs")
        shutil.rmtree(machine.temporary)
        machine.temporary.mkdir()

    def result(self) -> dict[str, Any]:
        """How the run has ended."""
        wait_for((self.folder / "result.json").exists)
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found

    def end(self) -> None:
        """The broker, which would stay for a while to answer how the run ended."""
        self.broker.send_signal(signal.SIGTERM)
        self.broker.wait()


class _TinyWorkspace(Workspace):
    def __init__(self, folder: Path, fork_server: ForkServer) -> None:
        plan, model, data = ((folder / name).read_text() for name in ("stageline.toml", "model.py", "data.py"))
        super().__init__(folder, fork_server)
        for name, text in (("stageline.toml", plan), ("model.py", model), ("data.py", data)):
            self.write(name, text)
