"""The processes of a local run: how they are started, started again, and ended.

Each is in a session of its own, so that Ctrl-C reaches `train` alone. They end themselves if it is killed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Protocol, TextIO

PARTING = 2.5  # seconds that processes get to leave by themselves, and again after SIGTERM, before they are killed


class Process(Protocol):
    """A process that was started: what `subprocess.Popen` offers of it."""

    pid: int
    returncode: int | None  # negative: the signal that ended it; None as long as `poll` has not seen it end

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int) -> None: ...


Spawn = Callable[[Sequence[str], TextIO], Process]  # arguments of the command `stageline`, and where its output goes


def spawn(arguments: Sequence[str], log: TextIO) -> Process:
    """Starts the command in a process and a session of its own."""
    return subprocess.Popen(  # noqa: S603  # our own command, with arguments that our own command was given
        [sys.executable, "-P", "-m", "stageline", *arguments],  # -P: nothing of the user's folder shadows a library
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


@dataclass(frozen=True, slots=True)
class LocalRun:
    """What to run, and where: `plan` is the command line's part that names the plan (file and --set options).

    `restarts`: a worker that dies is started again. `resume`: the run in `folder` goes on where it was stopped.
    `spares`: so many workers wait to take a lost one's place; what is started again joins them.
    """

    plan: Sequence[str]
    workers: int
    folder: Path
    restarts: bool = False
    spawn: Spawn = spawn
    resume: bool = False
    spares: int = 0


class Children:
    """The processes of a local run: the broker, one for each worker of the plan, and spare ones, by their names.

    All are ended on leaving the context, at once when `hurry` says so.
    """

    def __init__(self, local: LocalRun, sockets: Path, hurry: Callable[[], bool]) -> None:
        self.url = f"ipc://{sockets}/broker"
        self._sockets = sockets
        self._local = local
        self._hurry = hurry
        self._logs: list[TextIO] = []
        self.broker: Process | None = None
        self.workers: dict[str, Process] = {}
        self.indexes: dict[str, int] = {}  # which worker of the plan each is; spares are none, until the broker says so
        self._spares = 0  # started so far

    def __enter__(self) -> "Children":
        self.start_broker(resume=self._local.resume)
        for index in range(self._local.workers):
            self._start_worker(index)
        for _ in range(self._local.spares):
            self._start_spare()
        return self

    def __exit__(self, *_: object) -> None:
        """First the workers, which still have something to tell the broker, then the broker."""
        _end(list(self.workers.values()), self._hurry)
        _end([self.broker] if self.broker else [], self._hurry)
        for file in self._logs:
            file.close()

    def start_broker(self, *, resume: bool) -> None:
        run = ("--run", self._local.folder.name, *(("--resume",) if resume else ()))
        self.broker = self._start("broker", "broker", *self._local.plan, "--bind", self.url, *run)

    def start_again(self, name: str, *, running: bool) -> str:
        """Starts another for a worker whose process is gone; returns its name. In a `running` run with spares, one of
        them has the place by now: the new one is a spare."""
        del self.workers[name]
        index = self.indexes.pop(name, None)
        if index is None or (running and self._local.spares):
            return self._start_spare()
        return self._start_worker(index)

    def _start_worker(self, index: int) -> str:
        name = f"worker-{index}"
        self.indexes[name] = index
        return self._start_as(name, "--index", str(index))

    def _start_spare(self) -> str:
        self._spares += 1
        return self._start_as(f"spare-{self._spares}", "--spare")

    def _start_as(self, name: str, *role: str) -> str:
        place = ("--broker", self.url, "--name", name, "--sockets", str(self._sockets))
        self.workers[name] = self._start(name, "worker", *self._local.plan, *role, *place)
        return name

    @property
    def restarts(self) -> bool:
        """Whether workers that die are started again. How often is the broker's to decide."""
        return self._local.restarts

    @property
    def resumes(self) -> bool:
        """Whether the run goes on where it was stopped."""
        return self._local.resume

    def last_words(self, name: str) -> str:
        """The last line that a process has logged, or where its log is if it has logged nothing."""
        path = self._local.folder / f"{name}.log"
        lines = path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"nothing is in its log, {path}"

    def _start(self, name: str, *arguments: str) -> Process:
        log = (self._local.folder / f"{name}.log").open("a")
        self._logs.append(log)
        return self._local.spawn([*arguments, "--parent", str(os.getpid())], log)


def _end(processes: Sequence[Process], hurry: Callable[[], bool]) -> None:
    """Lets `processes` leave by themselves, then asks them to, then makes them: at once when there is a `hurry`."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        left = [process for process in processes if process.poll() is None]
        for process in left:
            if number is not None:
                process.send_signal(number)
        deadline = monotonic() + PARTING
        while any(process.poll() is None for process in left) and monotonic() < deadline:
            if hurry() and number is not signal.SIGKILL:
                break
            sleep(0.02)
