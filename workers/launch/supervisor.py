"""Supervision of a run's processes on this machine: the broker and the workers are started, watched and ended.

    train ──starts──> broker, worker 0, worker 1, ...        each in a session of its own: Ctrl-C reaches train alone
      │ <── status ── broker
      ├── a worker exits: reported to the broker; the broker exits: it is restarted on its store, and told of the exits
      └── a worker hangs, lost or still loading: it tells where it is and is killed, so that another can be started

A worker's exit is a loss unless the run is over, whatever its status; only a result that its command returned can be
final. Nothing outlives `supervise`: it ends every process it started, and they exit by themselves if it is killed.
"""

import signal
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic, sleep

from stageline.broker.ledger.member import describe_status
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.exit_codes import EXIT_CODES, Afterwards
from stageline.pipeline.process import last_line
from stageline.pipeline.process.child import Child
from stageline.pipeline.process.signals import Signals
from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.runs.folder import Facts, LaunchOutcome, read_control_secret
from stageline.workers.runs.owner import record_end

from .children import TELL_TIMEOUT, Children, Hangs, LocalRun, on_this_machine

POLL = 0.1  # seconds between two looks at the processes and at the broker's status
ANSWER_TIMEOUT = 0.5  # seconds for the broker to answer; the exit of a broker is not noticed meanwhile
SAVE_TIMEOUT = 5.5  # seconds for the workers of an interrupted run to finish and save a step
STOP_TIMEOUT = 6.0  # seconds for the broker of a run that is stopped to answer; it is not started again then
FINAL_TIMEOUT = 3.0  # seconds for the broker to end the run after a worker's final exit
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0  # seconds before a worker is restarted again, doubling each time
MAX_BROKER_RESTARTS = 5  # in a row
STEADY = 20.0  # seconds after which a process counts as one that stays up
_OVER = ("finished", "failed")  # phases of a run whose end the broker has recorded
# Results after which a worker is not restarted: the broker and the workers that may be missing are started here, too.
_FINAL = frozenset(
    code for code, ended in EXIT_CODES.items() if code and ended.afterwards in (Afterwards.FINAL, Afterwards.PATIENT)
)


def supervise(local: LocalRun, on_status: Callable[[Facts], None] = lambda facts: None) -> LaunchOutcome:
    """Run a local run to its end and return the outcome; `on_status` is called with every new status of the broker.

    The first SIGINT or SIGTERM stops the run, the second kills its processes. An end that the broker does not know, and
    so cannot record, is recorded here.
    """
    local.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())  # first: from here on there is something to clean up
        children = stack.enter_context(Children(local, lambda: signals.count > 1))
        client = stack.enter_context(Client(children.url, lambda: read_control_secret(local.folder), local.pair))
        supervisor = Supervisor(children, client)
        while (outcome := supervisor.poll(signals.count, on_status)) is None:
            sleep(POLL)
    if outcome.facts.get("phase") not in _OVER:
        record_end(local.folder, outcome.code, outcome.reason)
    return outcome


class Supervisor:
    """Watcher of a run's processes and its broker's status; restarts, kills and stops processes."""

    def __init__(self, children: Children, client: Client) -> None:
        """Watch `children`; `client` asks their broker."""
        self._children = children
        self._client = client
        self._facts: Facts = {}  # the broker's last status
        self._started: dict[str, float] = {}  # by name: when a process was first seen to run
        self._exited: dict[str, float] = {}  # by name: when a worker's exit was noticed
        self._ends: dict[int, tuple[int, int | None, str]] = {}  # by pid: how each that has exited did, as is reported
        self._repeated: set[int] = set()  # the pids of those that the present broker was told of again
        self._restarts: Counter[str] = Counter()  # by name: in a row
        self._hangs = Hangs(children)
        self._broker_restarts = 0  # in a row
        self._answered: float | None = None  # when the broker last answered, or was first asked
        self._stopped: float | None = None  # when the run was asked to stop
        self._why = "interrupted"  # it was
        self._script = children.local.script  # until its end is reported

    def poll(self, signals: int, on_status: Callable[[Facts], None]) -> LaunchOutcome | None:
        """Act on the present state, after `signals` signals; return the outcome of the run, None if it is not over."""
        facts = self._look()
        if facts:
            on_status(facts)
        over = facts.get("phase") in _OVER
        if over and not self._saves(facts):
            reason = self._reason(facts)
            self._client.dismiss()
            return LaunchOutcome(int(facts.get("code") or 0), reason, facts)
        if signals > 1:
            return LaunchOutcome(ExitCode.INTERRUPTED, "interrupted twice: ended at once", self._facts)
        if signals and self._stopped is None:
            self._stop()
        if self._stopped is None and (reason := self._irreplaceable()):  # what is saved is all: no step can be finished
            self._stopped, self._why = monotonic(), reason
            self._client.stop_run(reason)
        return None if over else self._failure()

    def _saves(self, facts: Facts) -> bool:
        """Return True if workers of a stopped run are still finishing the step that is to be saved.

        They may be on other machines, and the script may have stopped the run.
        """
        if not facts.get("saving"):
            return False
        if self._stopped is None:
            self._stopped = monotonic()
        return monotonic() - self._stopped <= SAVE_TIMEOUT

    def _reason(self, facts: Facts) -> str:
        """Return the broker's reason for the end, and what it does not know.

        Added are the places at which workers that it lost hang, and the last log lines of workers that failed before
        they could report to it.
        """
        given, workers = str(facts.get("reason") or ""), self._children.workers
        if facts.get("phase") == "finished":
            return given
        unjoined = [name for name in sorted(self._exited) if not self._hangs.has_joined(workers[name])]
        lines = [
            *(f"{_label(name)} is {line}" for name, line in self._hangs.where(facts).items()),
            *(f"last log line of {_label(name)}: {self._children.last_log_line(name)}" for name in unjoined),
        ]
        return "\n".join([given, *lines])

    def _stop(self) -> None:
        self._stopped = monotonic()
        saves = self._children.local.restarts
        reason = "interrupted" if saves else "interrupted, nothing saved"
        self._client.stop_run(reason, at_step_end=saves)

    def _irreplaceable(self) -> str:
        """Return a sentence on needed processes that have ended and cannot be started again; "" for none."""
        if not (gone := self._children.local.gone()):
            return ""
        ended = [_label(name) for name in sorted(self._exited) if self._is_due(name, 0)]
        broker = self._children.broker
        ended += ["the broker"] if broker is not None and broker.poll() is not None else []
        return f"{' and '.join(ended)} cannot be started again: {gone}" if ended else ""

    def _look(self) -> Facts:
        """Deal with processes that have ended or hang; return the broker's status, {} if it does not answer now."""
        self._report_exits()
        if self._script is not None and self._script.lifeline.cut:  # no process of the run knows its status
            self._report_exit(self._script.index, self._script.pid, 0, None, "")
            self._script = None
        broker = self._children.broker
        if self._stopped is None and not self._children.local.gone():
            self._restart_workers()
            if broker is not None and broker.poll() is not None and not self._has_broker_given_up():
                self._restart_broker()
        try:
            self._facts = self._client.ask("status", timeout=ANSWER_TIMEOUT if self._stopped is None else POLL)
        except BrokerUnreachable:
            self._kill_silent_broker()
            return {} if self._stopped is None else self._facts
        self._answered = monotonic()
        self._repeat_exits()
        self._started.setdefault("broker", monotonic())
        self._hangs.look(self._facts, self._started, monotonic())
        if self._stopped is None:
            self._hangs.end(monotonic())
        return self._facts

    def _report_exits(self) -> None:
        rows = on_this_machine(self._facts.get("workers", ()))
        assigned = {row["pid"]: row["index"] for row in rows}  # spares among them
        for name, process in self._children.workers.items():
            status = process.poll()
            if process.pid:
                self._started.setdefault(name, monotonic())
            if status is None:
                self._ends.pop(process.pid, None)  # the system may use a pid again
                self._repeated.discard(process.pid)
            elif name not in self._exited:
                self._exited[name] = monotonic()
                index = assigned.get(process.pid, self._children.indexes.get(name))
                self._report_exit(index, process.pid, status, process.result, self._hangs.detail(name, process))

    def _report_exit(self, index: int | None, pid: int, status: int, result: int | None, detail: str) -> None:
        """Tell the broker how a process has ended, and note it, since the broker may have to be told again.

        Args:
            index: Number of the place that the process has or is to take; None for a spare, which is reported once it
                has one.
            pid: Process id.
            status: Exit status, as `subprocess` gives it.
            result: Exit code that its command has returned; None if it ended without one.
            detail: Continuation of a sentence about the end.
        """
        self._ends[pid] = status, result, detail
        if index is not None:
            self._client.exited(index, pid, status, result, detail)

    def _repeat_exits(self) -> None:
        """Tell the broker, once, of each process that has exited and has a place in its newest status.

        A broker that was killed may not have stored the news of an exit. A spare may have exited before the broker gave
        it a place: then that place was not known when the exit was noticed.
        """
        for row in on_this_machine((*self._facts.get("workers", ()), self._facts.get("script") or {})):
            pid = row["pid"]
            if pid in self._ends and pid not in self._repeated:
                self._repeated.add(pid)
                self._client.exited(row["index"], pid, *self._ends[pid])

    def _restart_workers(self) -> None:
        for name, when in list(self._exited.items()):
            if when - self._started.get(name, when) >= STEADY:
                self._restarts[name] = 0
            if self._is_due(name, self._restarts[name]):
                del self._exited[name]
                self._started.pop(name, None)
                again = self._children.restart_worker(name, running=self._facts.get("phase") == "running")
                self._restarts[again] = self._restarts.pop(name, 0) + 1

    def _is_due(self, name: str, restarts: int) -> bool:
        """Return True if a worker that has exited is to be restarted now, the last of `restarts` in a row."""
        process = self._children.workers[name]
        return self._restartable(process) and monotonic() - self._exited[name] >= _pause(process, restarts)

    def _restartable(self, process: Child) -> bool:
        """Return True if a worker that has exited is to be restarted: not if the restart would only repeat its end.

        While the run lasts, a broker that was not found comes back.
        """
        final = process.result in _FINAL
        if process.result == ExitCode.NO_BROKER:
            final = self._facts.get("phase") != "running"
        return self._children.local.restarts and not final

    def _restart_broker(self) -> None:
        if monotonic() - self._started.pop("broker", monotonic()) >= STEADY:
            self._broker_restarts = 0
        self._broker_restarts += 1
        if self._broker_restarts <= MAX_BROKER_RESTARTS:
            sleep(0.1 * self._broker_restarts)
            self._repeated.clear()
            # Once the run goes on, workers keep their places: with --resume, all would begin again.
            resume = self._children.local.resume and self._facts.get("phase") != "running"
            self._children.start_broker(resume=resume)

    def _kill_silent_broker(self) -> None:
        """Kill a broker that hangs, or that takes longer to load the model than a worker may."""
        now, broker = monotonic(), self._children.broker
        self._answered = now if self._answered is None else self._answered
        if broker is not None and now - self._answered > self._children.local.loading:
            self._answered = now
            last_line.ask(broker.pid)
            sleep(TELL_TIMEOUT)
            broker.send_signal(signal.SIGKILL)

    def _failure(self) -> LaunchOutcome | None:
        """Return the end of a run that the broker cannot end, None if there is none.

        The broker keeps exiting, is gone when the run is stopped, or a worker exited before it joined.
        """
        heard = max(self._stopped or 0.0, self._answered or 0.0)
        if self._stopped is not None and (self._has_broker_failed() or monotonic() - heard > STOP_TIMEOUT):
            code = ExitCode.SAVED if self._facts.get("checkpoint") else ExitCode.INTERRUPTED
            return LaunchOutcome(code, self._unanswered_stop(), self._facts)
        if self._broker_restarts > MAX_BROKER_RESTARTS or self._has_broker_given_up():
            return LaunchOutcome(ExitCode.FAILED, self._broker_failure(), self._facts)
        for name, when in self._exited.items():
            process = self._children.workers[name]
            if not self._restartable(process) and monotonic() - when > FINAL_TIMEOUT:
                return self._worker_failure(name, process)
        return None

    def _has_broker_failed(self) -> bool:
        """Return True if the broker has ended by itself, with a reason in its log."""
        broker = self._children.broker
        return broker is not None and broker.poll() is not None and broker.result == ExitCode.FAILED

    def _has_broker_given_up(self) -> bool:
        """Return True if the broker has ended since its records could not be written for as long as that is tried.

        The next broker would try the same again.
        """
        return bool(self._facts.get("fault")) and self._has_broker_failed()

    def _unanswered_stop(self) -> str:
        checkpoint = self._facts.get("checkpoint")
        saved = f"checkpoint {checkpoint} is complete" if checkpoint else "nothing saved"
        last = self._children.last_log_line("broker").removeprefix("stageline: ")
        silent = f"did not answer for {STOP_TIMEOUT:g} s; its last log line"
        ended = "has ended" if self._has_broker_failed() else silent
        return f"{self._why}; {saved}. The broker {ended}: {last}"

    def _broker_failure(self) -> str:
        """Return the broker's own reason, and how often it has ended."""
        broker, line = self._children.broker, self._children.last_log_line("broker").removeprefix("stageline: ")
        if broker is not None and broker.result is None and broker.returncode is not None:
            at = self._children.last_code_line("broker")
            where = f", in {at}" if at is not None else ""
            line = f"the broker {describe_status(broker.returncode)}{where}. Its last log line: {line}"
        if self._has_broker_given_up():
            return line
        return f"{line}. The broker has ended {self._broker_restarts} times in a row, so it is not started again"

    def _worker_failure(self, name: str, process: Child) -> LaunchOutcome:
        reason = f"{_label(name)} has exited: {self._children.last_log_line(name)}"
        if process.result is None:
            what = ", ".join(
                part for part in (f"status {process.returncode}", self._hangs.detail(name, process)) if part
            )
            reason = f"{_label(name)} ended without a result ({what}): {self._children.last_log_line(name)}"
        if process.result == ExitCode.NO_BROKER:  # the broker was started here, so the cause is in its log
            reason += f"\nLast log line of the broker: {self._children.last_log_line('broker')}"
            return LaunchOutcome(ExitCode.FAILED, reason, self._facts)
        return LaunchOutcome(process.result or ExitCode.FAILED, reason, self._facts)


def _label(name: str) -> str:
    """Return the name for people, such as "worker 1" or "spare 2"."""
    return name.replace("-", " ")


def _pause(process: Child, restarts: int) -> float:
    """Return the seconds before a worker is started again.

    A worker that is done has left because the run is over: the next status says so.
    """
    if process.result == ExitCode.OK:
        return FINAL_TIMEOUT
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (restarts - 1)) if restarts else 0.0
