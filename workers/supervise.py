"""Runs a whole plan on this machine: starts the broker and the workers as processes, watches them, and stops them.

    train ──starts──> broker, worker 0, worker 1, ...        each in a session of its own: Ctrl-C reaches train alone
      │ <── status ── broker
      ├── a worker exits: the broker is told; the broker exits: it is started again on its store
      └── a worker hangs and has lost its place: it is killed, so that another can be started

Nothing outlives `run`: it ends every process it started, and they end themselves if it is killed.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any, Protocol, TextIO

from .client import BrokerUnreachable, Client

POLL = 0.1  # seconds between two looks at the processes and at the broker's status
ANSWER = 0.5  # seconds that the broker gets to answer; one that was killed is not noticed meanwhile
_BEFORE_IT_SPOKE = ("had not begun", "before it joined")
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0  # seconds before a worker is started again, doubling each time
_FINAL = frozenset({0, 2, 3, 69, 75, 78, 130})  # exit codes after which a worker is not started again
SAVING = 5.5  # seconds that the workers of an interrupted run get to finish and save a step
RESTARTS = 5  # of a broker that does not stay up
FAREWELL = 1.0  # seconds that a worker which has lost its place gets to leave by itself
VERDICT = 3.0  # seconds that the broker gets to say what a worker's exit means
PARTING = 2.5  # seconds that processes get to leave by themselves, and again after SIGTERM, before they are killed

Facts = dict[str, Any]


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
        [sys.executable, "-P", "-m", "workers.cli", *arguments],  # -P: a user's own workers.py is not ours
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


@dataclass(frozen=True, slots=True)
class Local:
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a local run ended: exit code, the reason in words, and the broker's last word on the run."""

    code: int
    reason: str
    facts: Facts


def run(local: Local, on_status: Callable[[Facts], None] = lambda facts: None) -> Outcome:
    """Runs to the end and returns how it ended; `on_status` is called with every new status of the broker.

    The first SIGINT or SIGTERM asks everyone to stop, the second ends them at once.
    """
    local.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        interrupts = stack.enter_context(_interrupts())  # first: from here on there is something to clean up
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stageline-")))
        crew = stack.enter_context(_Crew(local, sockets, interrupts))
        client = stack.enter_context(Client(crew.url))
        return _watch(crew, client, interrupts, on_status)


class _Crew:
    """The processes of a local run: the broker, one for each worker of the plan, and spare ones, by their names."""

    def __init__(self, local: Local, sockets: Path, interrupts: "_Interrupts") -> None:
        self.url = f"ipc://{sockets}/broker"
        self._sockets = sockets
        self._local = local
        self._interrupts = interrupts
        self._logs: list[TextIO] = []
        self.broker: Process | None = None
        self.workers: dict[str, Process] = {}
        self.indexes: dict[str, int] = {}  # which worker of the plan each is; spares are none, until the broker says so
        self._spares = 0  # started so far

    def __enter__(self) -> "_Crew":
        self.start_broker(resume=self._local.resume)
        for index in range(self._local.workers):
            self._start_worker(index)
        for _ in range(self._local.spares):
            self._start_spare()
        return self

    def __exit__(self, *_: object) -> None:
        """First the workers, which still have something to tell the broker, then the broker."""
        _end(list(self.workers.values()), self._interrupts)
        _end([self.broker] if self.broker else [], self._interrupts)
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


class _Interrupts:
    """Counts SIGINT and SIGTERM; from the second on, `now` says that the run must end at once."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def now(self) -> bool:
        return self.count > 1

    def note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    interrupts = _Interrupts()
    before = {number: signal.signal(number, interrupts.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(crew: _Crew, client: Client, interrupts: _Interrupts, on_status: Callable[[Facts], None]) -> Outcome:
    watch = _Watch(crew, client)
    while True:
        facts = watch.look()
        if facts:
            on_status(facts)
        if facts.get("phase") in ("finished", "failed") and not watch.still_saving:
            client.stop_run("the run is over", 0)  # nobody will ask the broker again: it may leave
            return Outcome(int(facts.get("code") or 0), watch.reason(str(facts.get("reason") or "")), facts)
        if interrupts.now:
            return Outcome(130, "interrupted twice: ended at once", watch.facts)
        if interrupts.count and watch.stopped is None:
            watch.stop()
        if (outcome := watch.hopeless()) is not None:
            return outcome
        sleep(POLL)


class _Watch:
    """Looks at the processes and the broker's status in turn, and keeps what it has seen."""

    def __init__(self, crew: _Crew, client: Client) -> None:
        self.facts: Facts = {}
        self._crew = crew
        self._client = client
        self._left: dict[str, float] = {}  # by name: when it was seen to be gone
        self._comebacks: Counter[str] = Counter()  # by name: how often it was started again
        self._lost: dict[int, float] = {}  # by pid: when a worker's place was given up
        self._broker_restarts = 0
        self.stopped: float | None = None  # when the run was asked to stop

    @property
    def still_saving(self) -> bool:
        """Whether workers of an interrupted run are finishing the step that is to be saved."""
        if self.stopped is None or not self._crew.restarts or monotonic() - self.stopped > SAVING:
            return False
        return any(process.poll() is None for process in self._crew.workers.values())

    def reason(self, told: str) -> str:
        """Why the run ended, as the broker tells it; of a worker that left before it could tell anyone, its last
        words are added."""
        if not any(words in told for words in _BEFORE_IT_SPOKE):
            return told
        crew = self._crew.workers
        failed = [name for name in self._left if crew[name].returncode not in (0, None)]
        return "\n".join(
            [told, *(f"{_in_words(name)} said last: {self._crew.last_words(name)}" for name in sorted(failed))]
        )

    def stop(self) -> None:
        """Ends the run because somebody wants it to."""
        self.stopped = monotonic()
        reason = "interrupted" if self._crew.restarts else "interrupted, nothing saved"
        self._client.stop_run(reason, 130, at_step_end=self._crew.restarts)

    def look(self) -> Facts:
        """The broker's status, {} if it does not answer now. Gone workers are reported, a gone broker is restarted, and
        lost workers that do not go are killed."""
        self._note_exits()
        self._restart_workers()
        if self.stopped is None and self._crew.broker is not None and self._crew.broker.poll() is not None:
            self._restart_broker()
        try:
            self.facts = self._client.ask("status", timeout=ANSWER if self.stopped is None else POLL)
        except BrokerUnreachable:
            return {} if self.stopped is None else self.facts
        self._kill_the_lost()
        return self.facts

    def hopeless(self) -> Outcome | None:
        """The end of a run that the broker cannot end: a worker left before it joined, or the broker will not stay."""
        if self._broker_restarts > RESTARTS:
            return Outcome(1, f"the broker does not stay up: {self._crew.last_words('broker')}", self.facts)
        for name, when in self._left.items():
            status = self._crew.workers[name].returncode
            if status and not self._comes_back(status) and monotonic() - when > VERDICT:
                words = f"{_in_words(name)} has left: {self._crew.last_words(name)}"
                return Outcome(status if status > 0 else 1, words, self.facts)
        return None

    def _note_exits(self) -> None:
        for name, process in self._crew.workers.items():
            status = process.poll()
            if status is not None and name not in self._left:
                self._left[name] = monotonic()
                index = self._index_of(name, process.pid)
                if index is not None:
                    self._client.exited(index, process.pid, status)

    def _index_of(self, name: str, pid: int) -> int | None:
        """Which worker of the plan the process was: a spare is the one that the broker has made it, or none."""
        has_place = (row["index"] for row in self.facts.get("workers", ()) if row.get("pid") == pid)
        return next(has_place, self._crew.indexes.get(name))

    def _kill_the_lost(self) -> None:
        """Whoever hangs does not hear that it was lost, and would leave its place empty for ever, or, if a spare has
        that by now, be of no use."""
        now = monotonic()
        for gap in self.facts.get("recovering", ()):
            self._lost.setdefault(gap["pid"], now - gap["since"])
        for process in self._crew.workers.values():
            if now - self._lost.get(process.pid, now) > FAREWELL and self.stopped is None:
                process.send_signal(signal.SIGKILL)

    def _comes_back(self, status: int) -> bool:
        """Whether a worker that left with `status` is started again: not if that would only repeat itself."""
        return self._crew.restarts and status not in _FINAL

    def _restart_workers(self) -> None:
        for name, when in list(self._left.items()):
            status = self._crew.workers[name].returncode
            if self.stopped is not None:
                return
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** self._comebacks[name])
            if status and self._comes_back(status) and monotonic() - when >= pause:
                del self._left[name]
                again = self._crew.start_again(name, running=self.facts.get("phase") == "running")
                self._comebacks[again] = self._comebacks.pop(name, 0) + 1

    def _restart_broker(self) -> None:
        self._broker_restarts += 1
        if self._broker_restarts <= RESTARTS:
            sleep(0.1 * self._broker_restarts)
            # Once the run goes on, workers keep their places: with --resume, all would begin again.
            self._crew.start_broker(resume=self._crew.resumes and self.facts.get("phase") != "running")


def _end(processes: Sequence[Process], interrupts: _Interrupts) -> None:
    """Lets `processes` leave by themselves, then asks them to, then makes them: at once after a second interrupt."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        left = [process for process in processes if process.poll() is None]
        for process in left:
            if number is not None:
                process.send_signal(number)
        deadline = monotonic() + PARTING
        while any(process.poll() is None for process in left) and monotonic() < deadline:
            if interrupts.now and number is not signal.SIGKILL:
                break
            sleep(0.02)


def _in_words(name: str) -> str:
    """ "worker 1" of worker-1."""
    return name.replace("-", " ")
