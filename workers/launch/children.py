"""The processes of a local run: started, restarted and ended.

Each is in a session of its own, so that Ctrl-C reaches `train` alone. They exit by themselves if `train` is killed.
A restarted worker is at work sooner in a process that has loaded torch before:

train  ──starts──>  python -m stageline.workers.cli.prepared      once the run is running, and again after each use
   └── the worker's arguments, as a line of JSON ──> its standard input; closed without a line: it is not needed
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Self, TextIO

import msgspec

EXIT_TIMEOUT = 2.5  # seconds for processes to exit by themselves, and again after SIGTERM, before SIGKILL


Process = subprocess.Popen[bytes]
Spawn = Callable[[Sequence[str], TextIO], Process]  # arguments of the command `stageline`, and the file for its output


def spawn(arguments: Sequence[str], log: TextIO) -> Process:
    """Starts a stageline command in a process and a session of its own."""
    return subprocess.Popen(  # noqa: S603  # our own command, with arguments that our own command was given
        [sys.executable, "-P", "-m", "stageline", *arguments],  # -P: no file in the user's folder shadows a library
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


@dataclass(frozen=True, slots=True)
class LocalRun:
    """What to run, and where. `plan` are the command-line arguments that name the plan (file and --set options).

    `restarts`: lost workers are started again. `resume`: continue the stopped run in `folder`. `spares`: the number of
    spare workers; with spares, a restarted worker becomes a spare.
    """

    plan: Sequence[str]
    workers: int
    folder: Path
    restarts: bool = False
    spawn: Spawn = spawn
    resume: bool = False
    spares: int = 0


class Children:
    """The processes of a local run by name: the broker, one for each worker of the plan, and spares.

    The context starts them on entry and ends them on exit; `kill_now` is asked whether they get no time to exit.
    """

    def __init__(self, local: LocalRun, sockets: Path, kill_now: Callable[[], bool]) -> None:
        self.url = f"ipc://{sockets}/broker"
        self.local = local
        self._sockets = sockets
        self._kill_now = kill_now
        self._logs: list[TextIO] = []
        self.broker: Process | None = None
        self.workers: dict[str, Process] = {}
        self.indexes: dict[str, int] = {}  # of each worker in the plan; a spare has none until the broker assigns it
        self._spares = 0  # started so far

    def __enter__(self) -> Self:
        self.start_broker(resume=self.local.resume, new=not self.local.resume)
        for index in range(self.local.workers):
            self._start_index(index)
        for _ in range(self.local.spares):
            self._start_spare()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the workers first, since they still report to the broker, then the broker."""
        _end(list(self.workers.values()), self._kill_now)
        _end([self.broker] if self.broker else [], self._kill_now)
        for file in self._logs:
            file.close()

    def start_broker(self, *, resume: bool, new: bool = False) -> None:
        """`new`: no broker has served the run before."""
        how = (*(("--resume",) if resume else ()), *(("--new",) if new else ()))
        run = ("--run", self.local.folder.name, *how)
        self.broker = self._start("broker", "broker", *self.local.plan, "--bind", self.url, *run)

    def restart_worker(self, name: str, *, running: bool) -> str:
        """Starts a process in place of an ended worker; returns its name. While the run is `running` and has spares,
        one of them has taken the worker's place, so the new process is a spare."""
        del self.workers[name]
        index = self.indexes.pop(name, None)
        if index is None or (running and self.local.spares):
            return self._start_spare()
        return self._start_index(index)

    def last_log_line(self, name: str) -> str:
        """The last line that a process has logged, or where its log is if that is empty."""
        path = self.local.folder / f"{name}.log"
        lines = path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"nothing is in its log, {path}"

    def _start_index(self, index: int) -> str:
        name = f"worker-{index}"
        self.indexes[name] = index
        return self._start_worker(name, "--index", str(index))

    def _start_spare(self) -> str:
        self._spares += 1
        return self._start_worker(f"spare-{self._spares}", "--spare")

    def _start_worker(self, name: str, *role: str) -> str:
        options = ("--broker", self.url, "--name", name, "--sockets", str(self._sockets))
        self.workers[name] = self._start(name, "worker", *self.local.plan, *role, *options)
        return name

    def _start(self, name: str, *arguments: str) -> Process:
        log = (self.local.folder / f"{name}.log").open("a")
        self._logs.append(log)
        return self.local.spawn([*arguments, "--parent", str(os.getpid())], log)


def _end(processes: Sequence[Process], kill_now: Callable[[], bool]) -> None:
    """Waits for `processes` to exit, then sends SIGTERM, then SIGKILL; does not wait when `kill_now()` is true."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        left = [process for process in processes if process.poll() is None]
        for process in left:
            if number is not None:
                process.send_signal(number)
        deadline = monotonic() + EXIT_TIMEOUT
        while any(process.poll() is None for process in left) and monotonic() < deadline:
            if kill_now() and number is not signal.SIGKILL:
                break
            sleep(0.02)


class Prefork(AbstractContextManager["Prefork"]):
    """A `Spawn` that uses the prepared process for the next worker, if `fill` was called before."""

    def __init__(self) -> None:
        self._ready: Process | None = None

    def __exit__(self, *_: object) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.kill()  # it holds nothing
            ready.communicate()

    def __call__(self, arguments: Sequence[str], log: TextIO) -> Process:
        if self._ready is None or arguments[0] != "worker":
            return spawn(arguments, log)
        ready, self._ready = self._ready, None  # even if it is still loading: it is ahead of one that has yet to start
        order = msgspec.json.encode(PreparedCommand(os.path.abspath(log.name), list(arguments)))
        try:
            with ready.stdin or open(os.devnull, "wb") as line:
                line.write(order)
        except BrokenPipeError:  # it has ended
            ready.wait()
            return spawn(arguments, log)
        return ready

    def fill(self) -> None:
        """Starts a process that will be ready in some seconds, unless there is one."""
        if self._ready is None:
            self._ready = subprocess.Popen(
                [sys.executable, "-P", "-m", "stageline.workers.cli.prepared"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )


class PreparedCommand(msgspec.Struct, frozen=True):
    """What the process is to run: a command's arguments, and the file that its output is appended to."""

    log: str
    arguments: list[str]
