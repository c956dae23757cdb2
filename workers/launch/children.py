"""Processes of a local run: started, restarted and ended.

Each is in a session of its own, so that Ctrl-C reaches `train` alone. They exit by themselves if `train` is killed.
"""

import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Self, TextIO

import msgspec

from stageline.broker.control.records import RunLength
from stageline.broker.keys.pairs import KeyPair
from stageline.pipeline.code_lines import CodeLine
from stageline.pipeline.process import last_line
from stageline.pipeline.process.child import Child, Spawn
from stageline.pipeline.process.lifeline import Lifeline
from stageline.workers.runs.folder import Facts
from stageline.workers.runs.logs import unstamped

EXIT_TIMEOUT = 2.5  # seconds for processes to exit by themselves, and again after SIGTERM, before SIGKILL


@dataclass(frozen=True, slots=True)
class ScriptProcess:
    """Script that calls the workers: the index of its place, its pid, and a lifeline that is cut at its end."""

    index: int
    pid: int
    lifeline: Lifeline


@dataclass(frozen=True, slots=True)
class LocalRun:
    """Task of a local run: the processes and their places.

    Attributes:
        plan: Command-line arguments that name the plan (file and --set options).
        workers: Number of workers; 0 if all are on other machines.
        folder: Folder of the run.
        spawn: Starts its processes.
        sockets: Folder for their sockets.
        loading: Seconds that a worker may take to load the model and the data.
        restarts: Lost workers are started again.
        resume: Continue the stopped run in `folder`.
        spares: Number of spare workers; with spares, a restarted worker becomes a spare.
        gone: Returns why `spawn` can start no process any more, "" as long as it can.
        script: Script of a scripted run.
        length: Number of steps of the run, if known.
        broker: Address at which the broker is found from here, if the workers are on other machines; "": it takes an
            address of its own.
        pair: Pair by which the broker knows this process; None for an address without a key.
    """

    plan: Sequence[str]
    workers: int
    folder: Path
    spawn: Spawn
    sockets: Path
    loading: float
    restarts: bool = False
    resume: bool = False
    spares: int = 0
    gone: Callable[[], str] = lambda: ""
    script: ScriptProcess | None = None
    length: RunLength | None = None
    broker: str = ""
    pair: KeyPair | None = None


def broker_url(sockets: Path) -> str:
    """Return the address of the broker of a local run whose sockets are in the folder `sockets`."""
    return f"ipc://{sockets}/broker"


class Children:
    """Processes of a local run by name: the broker, one for each worker of the plan, and spares.

    The context starts them on entry and ends them on exit.
    """

    def __init__(self, local: LocalRun, kill_now: Callable[[], bool]) -> None:
        """Prepare the processes of `local`; `kill_now` returns True if they get no time to exit."""
        self.url = local.broker or broker_url(local.sockets)
        self.local = local
        self._kill_now = kill_now
        self._logs: dict[str, tuple[TextIO, int]] = {}  # by name, with where the present process's part begins
        self.broker: Child | None = None
        self.workers: dict[str, Child] = {}
        self.indexes: dict[str, int] = {}  # of each worker in the plan; a spare has none until the broker assigns it
        self._spares = 0  # started so far

    def __enter__(self) -> Self:
        """Start the broker, the workers and the spares."""
        self.start_broker(resume=self.local.resume, new=not self.local.resume)
        for index in (*range(self.local.workers), *[None] * self.local.spares):
            self._start_worker(index)
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers first, since they still report to the broker, then the broker."""
        _end(list(self.workers.values()), self._kill_now)
        _end([self.broker] if self.broker else [], self._kill_now)
        for log in self._logs.values():
            log[0].close()

    def start_broker(self, *, resume: bool, new: bool = False) -> None:
        """Start the broker; `new` if no broker has served the run before."""
        how = (*(("--resume",) if resume else ()), *(("--new",) if new else ()))
        length = self.local.length
        if length is not None:
            how += ("--length", msgspec.json.encode(length).decode())
        run = ("--run", self.local.folder.name, *how)
        bound = () if self.local.broker else ("--bind", self.url)
        self.broker = self._start("broker", "broker", *self.local.plan, *bound, *run)

    def restart_worker(self, name: str, *, running: bool) -> str:
        """Start a process in place of an ended worker; return its name.

        While the run is `running` and has spares, a spare has taken the worker's place, so the new process is a spare.
        """
        del self.workers[name]
        index = self.indexes.pop(name, None)
        return self._start_worker(None if running and self.local.spares else index)

    def last_log_line(self, name: str) -> str:
        """Return the last line that a process has logged, without its time; where its log is if there is none."""
        log, start = self._logs[name]
        lines = Path(log.name).read_bytes()[start:].decode(errors="replace").strip().splitlines()
        return unstamped(lines[-1]) if lines else f"nothing is in its log, {log.name}"

    def last_code_line(self, name: str) -> CodeLine | None:
        """Return the line at which a process crashed, called `os._exit`, or was last asked; None if it did not tell."""
        log, start = self._logs[name]
        return last_line.read(Path(log.name), start)

    def _start_worker(self, index: int | None) -> str:
        """Start the worker `index`, or with None a spare; return its name."""
        if index is None:
            self._spares += 1
            name, role = f"spare-{self._spares}", ["--spare"]
        else:
            name, role = f"worker-{index}", ["--index", str(index)]
            self.indexes[name] = index
        options = ("--broker", self.url, "--name", name, "--sockets", str(self.local.sockets))
        self.workers[name] = self._start(name, "worker", *self.local.plan, *role, *options)
        return name

    def _start(self, name: str, *arguments: str) -> Child:
        if name in self._logs:
            self._logs[name][0].close()
        log = (self.local.folder / f"{name}.log").open("a")
        self._logs[name] = log, log.tell()
        return self.local.spawn(arguments, log)


def _end(processes: Sequence[Child], kill_now: Callable[[], bool]) -> None:
    """Wait for `processes` to exit, then send SIGTERM, then SIGKILL; do not wait when `kill_now()` is true."""
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


LOST_TIMEOUT = 1.0  # seconds for a lost worker to exit by itself, before it is killed
TELL_TIMEOUT = 0.5  # seconds for a worker that hangs to tell where it is


def on_this_machine(rows: Iterable[Facts]) -> list[Facts]:
    """Return the rows of a status whose processes run here: another machine may have given their pids to others."""
    here = socket.gethostname()
    return [row for row in rows if row.get("host") == here]


class Hangs:
    """Workers of a local run that hang. Times are monotonic, in seconds."""

    def __init__(self, children: Children) -> None:
        """Watch the workers of `children`."""
        self._children = children
        self._joined: set[int] = set()  # the pids that the broker knows
        self._since: dict[int, float] = {}  # by pid: from when on a worker hangs that is to be killed
        self._asked: set[int] = set()  # the pids of those that were asked where they are
        self._why: dict[int, str] = {}  # by pid: why a worker was killed, if the broker does not know

    def has_joined(self, process: Child) -> bool:
        """Return True if the broker knows the process."""
        return process.pid in self._joined

    def look(self, facts: Facts, started: Mapping[str, float], now: float) -> None:
        """Note which workers hang: lost ones, and those that have not joined in time.

        A lost worker that hangs does not learn that it is lost. Its process must end before it is restarted.

        Args:
            facts: The broker's new status.
            started: Time at which each process was started, by name.
            now: Present time.
        """
        rows = on_this_machine((*facts.get("workers", ()), *facts.get("spares", ())))
        self._joined |= {row["pid"] for row in rows}
        for lost in on_this_machine(facts.get("recovering", ())):
            self._since.setdefault(lost["pid"], now - lost["since"])
        loading = self._children.local.loading
        for name, process in self._children.workers.items():
            late = now - started.get(name, now) > loading and not self.has_joined(process)
            if late and process.poll() is None:
                self._since.setdefault(process.pid, now)
                self._why[process.pid] = f"since it had not joined within {loading:g} s (recovery.loading)"

    def end(self, now: float) -> None:
        """Ask hanging workers for their place, and kill those that were asked before."""
        for process in self._children.workers.values():
            since = now - self._since.get(process.pid, now)
            if since > LOST_TIMEOUT - TELL_TIMEOUT and process.pid not in self._asked and process.poll() is None:
                self._asked.add(process.pid)
                last_line.ask(process.pid)
            elif since > LOST_TIMEOUT:
                process.send_signal(signal.SIGKILL)

    def detail(self, name: str, process: Child) -> str:
        """Return the facts about the end of a process that returned no result, continuing a sentence about it."""
        line = self._children.last_code_line(name) if process.result is None else None
        return ", ".join(part for part in (self._why.get(process.pid, ""), f"in {line}" if line else "") if part)

    def where(self, facts: Facts) -> dict[str, str]:
        """Return the places of lost workers that still run, by name: "in forward (model.py, line 12)"."""
        rows = on_this_machine(facts.get("workers", ()))
        lost = {row["pid"] for row in rows if row.get("standing") == "lost"}
        workers = self._children.workers.items()
        going = {name: process for name, process in workers if process.pid in lost and process.poll() is None}
        for process in going.values():
            last_line.ask(process.pid)
        deadline, found = monotonic() + TELL_TIMEOUT, dict[str, str]()
        while len(found) < len(going) and monotonic() < deadline:
            sleep(0.02)
            lines = {name: self._children.last_code_line(name) for name in going}
            found = {name: f"in {line}" for name, line in lines.items() if line is not None}
        return found
