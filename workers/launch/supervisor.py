"""Runs a whole plan on this machine: starts the broker and the workers as processes, watches them, and stops them.

    train ──starts──> broker, worker 0, worker 1, ...        each in a session of its own: Ctrl-C reaches train alone
      │ <── status ── broker
      ├── a worker exits: the broker is told; the broker exits: it is started again on its store
      └── a worker hangs and has lost its place: it is killed, so that another can be started

Nothing outlives `run`: it ends every process it started, and they end themselves if it is killed.
"""

import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from stageline.pipeline.exit_code import ExitCode
from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.process.signals import Signals

from .children import Children, LocalRun

POLL = 0.1  # seconds between two looks at the processes and at the broker's status
ANSWER = 0.5  # seconds that the broker gets to answer; one that was killed is not noticed meanwhile
_BEFORE_IT_SPOKE = ("had not begun", "before it joined")
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0  # seconds before a worker is started again, doubling each time
# Exit codes after which a worker is not started again.
_FINAL = frozenset(
    {ExitCode.OK, ExitCode.USAGE, ExitCode.NO_BROKER, ExitCode.NO_WORKER, ExitCode.SAVED, ExitCode.REFUSED}
)
SAVING = 5.5  # seconds that the workers of an interrupted run get to finish and save a step
RESTARTS = 5  # of a broker that does not stay up
FAREWELL = 1.0  # seconds that a worker which has lost its place gets to leave by itself
VERDICT = 3.0  # seconds that the broker gets to say what a worker's exit means

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """How a local run ended: exit code, the reason in words, and the broker's last word on the run."""

    code: int
    reason: str
    facts: Facts


def run(local: LocalRun, on_status: Callable[[Facts], None] = lambda facts: None) -> LaunchOutcome:
    """Runs to the end and returns how it ended; `on_status` is called with every new status of the broker.

    The first SIGINT or SIGTERM asks everyone to stop, the second ends them at once.
    """
    local.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())  # first: from here on there is something to clean up
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stageline-")))
        crew = stack.enter_context(Children(local, sockets, lambda: signals.count > 1))
        client = stack.enter_context(Client(crew.url))
        return _watch(crew, client, signals, on_status)


def _watch(crew: Children, client: Client, signals: Signals, on_status: Callable[[Facts], None]) -> LaunchOutcome:
    watch = _Supervisor(crew, client)
    while True:
        facts = watch.look()
        if facts:
            on_status(facts)
        if facts.get("phase") in ("finished", "failed") and not watch.still_saving:
            client.stop_run("the run is over", ExitCode.OK)  # nobody will ask the broker again: it may leave
            return LaunchOutcome(int(facts.get("code") or 0), watch.reason(str(facts.get("reason") or "")), facts)
        if signals.count > 1:
            return LaunchOutcome(ExitCode.INTERRUPTED, "interrupted twice: ended at once", watch.facts)
        if signals.count and watch.stopped is None:
            watch.stop()
        if (outcome := watch.hopeless()) is not None:
            return outcome
        sleep(POLL)


class _Supervisor:
    """Looks at the processes and the broker's status in turn, and keeps what it has seen."""

    def __init__(self, crew: Children, client: Client) -> None:
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
        self._client.stop_run(reason, ExitCode.INTERRUPTED, at_step_end=self._crew.restarts)

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

    def hopeless(self) -> LaunchOutcome | None:
        """The end of a run that the broker cannot end: a worker left before it joined, or the broker will not stay."""
        if self._broker_restarts > RESTARTS:
            return LaunchOutcome(
                ExitCode.FAILED, f"the broker does not stay up: {self._crew.last_words('broker')}", self.facts
            )
        for name, when in self._left.items():
            status = self._crew.workers[name].returncode
            if status and not self._comes_back(status) and monotonic() - when > VERDICT:
                words = f"{_in_words(name)} has left: {self._crew.last_words(name)}"
                if status == ExitCode.NO_BROKER:  # it was started here, so the cause is there
                    return LaunchOutcome(
                        ExitCode.FAILED, f"{words}\nThe broker said last: {self._crew.last_words('broker')}", self.facts
                    )
                return LaunchOutcome(status if status > 0 else ExitCode.FAILED, words, self.facts)
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


def _in_words(name: str) -> str:
    """ "worker 1" of worker-1."""
    return name.replace("-", " ")
