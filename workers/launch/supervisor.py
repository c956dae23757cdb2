"""Supervises the processes of a run on this machine: starts the broker and the workers, watches and ends them.

    train ──starts──> broker, worker 0, worker 1, ...        each in a session of its own: Ctrl-C reaches train alone
      │ <── status ── broker
      ├── a worker exits: reported to the broker; the broker exits: it is restarted on its store
      └── a lost worker hangs: it is killed, so that another can be started

Nothing outlives `supervise`: it ends every process it started, and they exit by themselves if it is killed.
"""

import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep

from stageline.pipeline.errors import ExitCode
from stageline.workers.control.client import BrokerUnreachable, Client
from stageline.workers.process.signals import Signals
from stageline.workers.runs.folder import read_control_secret
from stageline.workers.runs.result import Facts, LaunchOutcome

from .children import Children, LocalRun

POLL = 0.1  # seconds between two looks at the processes and at the broker's status
ANSWER_TIMEOUT = 0.5  # seconds for the broker to answer; the exit of a broker is not noticed meanwhile
SAVE_TIMEOUT = 5.5  # seconds for the workers of an interrupted run to finish and save a step
LOST_TIMEOUT = 1.0  # seconds for a lost worker to exit by itself, before it is killed
VERDICT_TIMEOUT = 3.0  # seconds for the broker to end the run after a worker's final exit
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0  # seconds before a worker is restarted, doubling each time
MAX_BROKER_RESTARTS = 5
_FINAL = frozenset(  # exit codes after which a worker is not restarted
    {ExitCode.OK, ExitCode.USAGE, ExitCode.NO_BROKER, ExitCode.NO_WORKER, ExitCode.SAVED, ExitCode.REFUSED}
)
_NOT_STARTED = "before it joined"  # in the broker's reason, if only the worker's log has the cause


def supervise(local: LocalRun, on_status: Callable[[Facts], None] = lambda facts: None) -> LaunchOutcome:
    """Runs to the end and returns how it ended; `on_status` is called with every new status of the broker.

    The first SIGINT or SIGTERM stops the run, the second kills its processes.
    """
    local.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())  # first: from here on there is something to clean up
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stageline-")))
        children = stack.enter_context(Children(local, sockets, lambda: signals.count > 1))
        client = stack.enter_context(Client(children.url, lambda: read_control_secret(local.folder)))
        supervisor = Supervisor(children, client)
        while (outcome := supervisor.poll(signals.count, on_status)) is None:
            sleep(POLL)
        return outcome


class Supervisor:
    """Watches the processes and the broker's status; restarts, kills and stops."""

    def __init__(self, children: Children, client: Client) -> None:
        self._children = children
        self._client = client
        self._facts: Facts = {}  # the broker's last status
        self._exited: dict[str, float] = {}  # by name: when a worker's exit was noticed
        self._restarts: Counter[str] = Counter()  # by name
        self._lost: dict[int, float] = {}  # by pid: when the broker declared a worker lost
        self._broker_restarts = 0
        self._stopped: float | None = None  # when the run was asked to stop

    def poll(self, signals: int, on_status: Callable[[Facts], None]) -> LaunchOutcome | None:
        """Does what is due, `signals` having come so far; returns how the run ended, None while it goes on."""
        facts = self._look()
        if facts:
            on_status(facts)
        if facts.get("phase") in ("finished", "failed") and not self._saving:
            self._client.dismiss()
            return LaunchOutcome(int(facts.get("code") or 0), self._reason(str(facts.get("reason") or "")), facts)
        if signals > 1:
            return LaunchOutcome(ExitCode.INTERRUPTED, "interrupted twice: ended at once", self._facts)
        if signals and self._stopped is None:
            self._stop()
        return self._failure()

    @property
    def _saving(self) -> bool:
        """Whether workers of an interrupted run are still finishing the step that is to be saved."""
        stops = self._stopped is not None and monotonic() - self._stopped <= SAVE_TIMEOUT
        saves = stops and self._children.local.restarts
        return saves and any(process.poll() is None for process in self._children.workers.values())

    def _reason(self, given: str) -> str:
        """Why the run ended, as the broker gives it; with the last log lines of workers that failed before they could
        report to it."""
        if _NOT_STARTED not in given:
            return given
        workers = self._children.workers
        failed = sorted(name for name in self._exited if workers[name].returncode not in (0, None))
        lines = (f"last log line of {name.replace('-', ' ')}: {self._children.last_log_line(name)}" for name in failed)
        return "\n".join([given, *lines])

    def _stop(self) -> None:
        self._stopped = monotonic()
        saves = self._children.local.restarts
        reason = "interrupted" if saves else "interrupted, nothing saved"
        self._client.stop_run(reason, at_step_end=saves)

    def _look(self) -> Facts:
        """The broker's status, {} if it does not answer now; processes that have ended or hang are dealt with."""
        self._report_exits()
        broker = self._children.broker
        if self._stopped is None:
            self._restart_workers()
            if broker is not None and broker.poll() is not None:
                self._restart_broker()
        try:
            self._facts = self._client.ask("status", timeout=ANSWER_TIMEOUT if self._stopped is None else POLL)
        except BrokerUnreachable:
            return {} if self._stopped is None else self._facts
        self._kill_lost()
        return self._facts

    def _report_exits(self) -> None:
        assigned = {row.get("pid"): row["index"] for row in self._facts.get("workers", ())}  # spares among them
        for name, process in self._children.workers.items():
            status = process.poll()
            if status is not None and name not in self._exited:
                self._exited[name] = monotonic()
                index = assigned.get(process.pid, self._children.indexes.get(name))
                if index is not None:
                    self._client.exited(index, process.pid, status)

    def _restart_workers(self) -> None:
        for name, when in list(self._exited.items()):
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** self._restarts[name])
            if self._restartable(self._children.workers[name].returncode) and monotonic() - when >= pause:
                del self._exited[name]
                again = self._children.restart_worker(name, running=self._facts.get("phase") == "running")
                self._restarts[again] = self._restarts.pop(name, 0) + 1

    def _restartable(self, status: int | None) -> bool:
        """Whether a worker that exited with `status` is restarted: not if that would only repeat itself."""
        return self._children.local.restarts and status not in _FINAL

    def _restart_broker(self) -> None:
        self._broker_restarts += 1
        if self._broker_restarts <= MAX_BROKER_RESTARTS:
            sleep(0.1 * self._broker_restarts)
            # Once the run goes on, workers keep their places: with --resume, all would begin again.
            resume = self._children.local.resume and self._facts.get("phase") != "running"
            self._children.start_broker(resume=resume)

    def _kill_lost(self) -> None:
        """A lost worker that hangs does not learn that it is lost. Its process must end before it is restarted."""
        now = monotonic()
        for lost in self._facts.get("recovering", ()):
            self._lost.setdefault(lost["pid"], now - lost["since"])
        for process in self._children.workers.values():
            if now - self._lost.get(process.pid, now) > LOST_TIMEOUT and self._stopped is None:
                process.send_signal(signal.SIGKILL)

    def _failure(self) -> LaunchOutcome | None:
        """The end of a run that the broker cannot end: it keeps exiting, or a worker exited before it joined."""
        if self._broker_restarts > MAX_BROKER_RESTARTS:
            reason = f"the broker does not stay up: {self._children.last_log_line('broker')}"
            return LaunchOutcome(ExitCode.FAILED, reason, self._facts)
        for name, when in self._exited.items():
            status = self._children.workers[name].returncode
            if status and not self._restartable(status) and monotonic() - when > VERDICT_TIMEOUT:
                return self._worker_failure(name, status)
        return None

    def _worker_failure(self, name: str, status: int) -> LaunchOutcome:
        reason = f"{name.replace('-', ' ')} has exited: {self._children.last_log_line(name)}"
        if status == ExitCode.NO_BROKER:  # the broker was started here, so the cause is in its log
            reason += f"\nLast log line of the broker: {self._children.last_log_line('broker')}"
            return LaunchOutcome(ExitCode.FAILED, reason, self._facts)
        return LaunchOutcome(status if status > 0 else ExitCode.FAILED, reason, self._facts)
