"""Script's run on local processes: its launcher starts broker and workers, and the script joins as their driver.

ProcessRun(...)   launcher -> broker's address -> the script's place -> queues -> Driver
close()           the call STOP -> the workers save their weights -> the run has finished -> the processes end
abort(reason)     Goodbye: the workers carry out what was called, save the state after that, and end
discard()         the processes end, or are killed
"""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from pathlib import Path
from time import monotonic

import structlog
from torch import Tensor

from stageline.broker.control.messages import Assigned, Goodbye
from stageline.broker.coordinator.run import RunPhase
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import Plan
from stageline.pipeline.program import Program
from stageline.workers.checkpoint.directory import SnapshotDirectory
from stageline.workers.checkpoint.trained_weights import load_weights
from stageline.workers.control.client import BrokerUnreachable
from stageline.workers.control.control_thread import ControlThread
from stageline.workers.control.joining import Stopped
from stageline.workers.control.party_trust import trust_of
from stageline.workers.control.peeking import Peeker, all_withheld_by, withheld_by
from stageline.workers.control.views import Views
from stageline.workers.errors import RunFailed
from stageline.workers.keys.keyring import pair_towards
from stageline.workers.keys.party_keys import pair_of_place
from stageline.workers.process.open_queues import open_queues, reachable
from stageline.workers.process.worker_process import identity_of
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import Facts
from stageline.workers.runs.records import measured_timetable
from stageline.workers.runtime.calls import Call, CallKind, Position
from stageline.workers.script.calls.batch_record import BatchRecord, DiffersFrom
from stageline.workers.script.calls.calls import Replies, WeightNames
from stageline.workers.script.calls.driver import Driver
from stageline.workers.script.calls.news import Asked, ask, early_end, say, waits_for, watch_for_close, worker_lines
from stageline.workers.script.calls.page import Timetable, timed_in, timetable_of

from .launcher import LauncherLifeline, LocalProcesses, start_processes
from .panels import panels_of
from .saving import await_former_processes, save_checkpoint

BEGIN_TIMEOUT = 5.0  # seconds, as the workers have for the steps themselves
_LOOK = 0.05  # seconds between two questions
NAME = "script.log"
JOIN_TIMEOUT = 60.0  # seconds for the broker to answer
FINISH_TIMEOUT = 60.0  # seconds for the workers of a run to save their weights
END_TIMEOUT = 20.0  # seconds for the processes of a run that is over to end by themselves
DISCARD_TIMEOUT = 2.0  # seconds for the processes of a run of which nothing is wanted, before they are killed
QUIET = 2.0  # seconds that a run may take to end before that is said
CLOSE_TIMEOUT = 5.0  # seconds for the thread that owns the queues


def await_beginning(asked: Asked, ended: threading.Event) -> None:
    """Return once all workers have joined the run, it has `ended`, or `BEGIN_TIMEOUT` seconds have passed."""
    deadline = monotonic() + BEGIN_TIMEOUT
    while not ended.is_set() and monotonic() < deadline:
        facts = asked("status")
        if facts is None or facts["phase"] != RunPhase.WAITING:
            return
        ended.wait(_LOOK)


@contextmanager
def script_log(folder: Path) -> Iterator[None]:
    """Return a context with a log in `script.log` in `folder`, unless the user has configured structlog."""
    with ExitStack() as stack:
        if not structlog.is_configured():
            file = stack.enter_context((folder / NAME).open("a", buffering=1))
            stack.callback(structlog.reset_defaults)
            structlog.configure(logger_factory=structlog.WriteLoggerFactory(file))
        yield


class ProcessRun:
    """Run whose broker and workers are processes. Methods are for the script's thread unless they say otherwise.

    Attributes:
        size: Number of workers.
        folder: Folder of the run's files.
        cannot_save: Why the run saves no checkpoints; "" if it does.
    """

    cannot_save = ""
    _workers_timeout = inf  # seconds for the workers of a resumed run to come

    def __init__(
        self, plan: Plan, program: Program, names: WeightNames, resume: str | None = None, begun: str = ""
    ) -> None:
        """Start the processes, and join the broker.

        Args:
            plan: Plan with a known number of stages.
            program: Program of its workers.
            names: Names of the weights that each worker has.
            resume: Id of the run to continue; None begins one.
            begun: Id of the run that is begun; "" for a new one.

        Raises:
            NoSuchRun, PlanRefused, RunFailed: The run cannot be continued, or does not start. Errors of
                `start_processes` are raised, too.
        """
        self._plan = plan
        self.size = program.script
        self._wanted = True  # is told about if it ends early
        self._knows_failure = False  # the script has been told why it failed
        self._names = names
        self._program = program
        run = begun if begun and resume is None else runs.name_of(plan, resume)
        self.folder = runs.folder(plan, run)
        if resume is not None:
            runs.require_same_plan(plan, self.folder)
            await_former_processes(self.folder, plan.recovery.lease)
        with ExitStack() as stack:  # whatever fails ends what was started, in reverse order
            self._processes = stack.enter_context(self._start(run, resume=resume is not None))
            stack.enter_context(script_log(self.folder))
            broker = self._processes.broker
            self._pair = pair_towards(broker, os.environ)
            member = pair_of_place(plan, broker, program.script, os.environ)
            self._control = ControlThread(
                broker,
                identity_of(plan, "script", program.script),
                member,
                trust=trust_of(plan, member),
                lifeline=LauncherLifeline(self._processes),
                exit_process=lambda code: None,
            )
            stack.callback(self._control.close)
            self._assigned = self._join()
            self._driver = self._drive(stack)
            self._await_workers()
            self._stack = ExitStack()
            self._stack.callback(self._tell_early_end)  # once the processes have ended
            self._stack.push(stack.pop_all())
        self._open = watch_for_close(self, self.folder, self._driver.progress)

    @property
    def position(self) -> int:
        """Number of training steps called so far."""
        return self._driver.position.step

    def submit(self, call: Call) -> "Future[Replies]":
        """Send a call to the workers, which carry calls out in order; return the future of their replies.

        The tensors of `call` must not be written to afterwards.

        Raises:
            RunFailed: The run is over.
            DataError: The batch differs from the one that its step was trained on before.
        """
        if call.kind is CallKind.TRAIN and self._batches is not None:
            self._batches.check(self.position, call.inputs, call.targets)
        return self._driver.submit(call)

    def close(self) -> None:
        """End the run: carry out every call and keep the weights. Raises `RunFailed` if that fails."""
        self._open.detach()
        with self._stack:
            last = self._driver.submit(Call(CallKind.STOP))
            self._driver.leave()  # the broker ends the run once it knows that this was the last call
            last.result()
            if not self._driver.ended.wait(FINISH_TIMEOUT):
                raise self._failure(f"the run has not ended {FINISH_TIMEOUT:g} s after its last call", ExitCode.FAILED)
            self._driver.raise_failure()
            self._driver.close(CLOSE_TIMEOUT)  # the broker removes queues from a server once all have left them
            self._control.send(Goodbye(self._assigned.incarnation, "its line is closed"))
            self._processes.wait(END_TIMEOUT)
            self._wanted = False

    def timetable(self) -> Timetable:
        """Return the timetable of the newest step whose times are known, or the planned one.

        The broker is asked; after its end, its records tell.
        """
        schedule = self._program.schedule
        facts = None if self._driver.ended.is_set() else self._ask("timetable")
        if facts is None:
            return timetable_of(schedule, measured_timetable(self._plan, self.folder.name, schedule, self.position))
        return timetable_of(schedule, timed_in(schedule, facts))

    def panels(self) -> str:
        """Return the page about the run as an element of a notebook's page."""
        broker = "" if self._driver.ended.is_set() else self._processes.broker
        return panels_of(self.folder, broker, self._pair)

    def save(self, folder: Path, call: Callable[[str], Replies]) -> None:
        """Save a checkpoint; `call` has the workers write it into the folder that it is given. Raises `NotSaved`."""
        save_checkpoint(folder, self._plan, self.folder.name, lambda: self.position, call)

    def of_fit(self, number: int) -> DiffersFrom | None:
        """Return a function that compares the batches that fit `number` passes over with those of before.

        Returns None if there is nothing to compare. The record notes where a fit begins.
        """
        return None if self._batches is None else self._batches.of_fit(number, self.position)

    def waits_for(self) -> str:
        """Return what the run has waited for longer than a moment; "" for nothing.

        For any thread; may take seconds.
        """
        return "" if self._driver.ended.is_set() else waits_for(self._driver.progress, self._ask)

    def news(self) -> list[str]:
        """Return news of the workers since the last call, as lines for people. For any thread."""
        return self._processes.news()

    def workers(self) -> list[str]:
        """Return one line for each worker with its state; none once they have ended."""
        return [] if self._driver.ended.is_set() else worker_lines(self._ask)

    def weights(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Return the weights of a run that was closed, or their averages, under the unsplit model's names."""
        return load_weights(self.folder, ema=ema and self.position > 0)

    def abort(self, reason: str, *, knows_failure: bool = False, interrupted: bool = False) -> None:
        """End the run as it is; saved files stay, and stderr is told.

        Args:
            reason: Reason for the broker and the message.
            knows_failure: The script knows why the run failed, so that it is not told again.
            interrupted: Ctrl-C ended the run, so that another one may come, which ends all at once.
        """
        self._open.detach()
        self._knows_failure = knows_failure
        with self._stack:
            try:
                steps = self._driver.leave()
                saves = steps > 0 and self._plan.recovery.on
                if saves:
                    await_beginning(self._ask, self._driver.ended)
                self._control.send(Goodbye(self._assigned.incarnation, reason, steps))
                what = "the workers finish their step and save it" if saves and not knows_failure else "the run ends"
                if self._processes.wait(QUIET) is None:
                    say(f"{what}; another Ctrl-C ends all at once" if interrupted else f"{reason}: {what}")
                    self._processes.wait(END_TIMEOUT)
            except KeyboardInterrupt:  # once more: nothing is saved any longer
                self._processes.abandon()
                raise

    def discard(self) -> None:
        """End the run as it is, without a message; no file of it is of use any more."""
        self._wanted = False
        self._open.detach()
        with self._stack:
            self._driver.leave()
            self._processes.close(DISCARD_TIMEOUT, END_TIMEOUT)

    def _start(self, run: str, *, resume: bool) -> LocalProcesses:
        say(*(f"warning: {warning}" for warning in self._plan.warnings))
        return start_processes(self._plan, run, resume=resume)

    def _tell_early_end(self) -> None:
        if self._wanted:
            with suppress(OSError, ValueError):  # stderr may be closed
                say(early_end(self.folder, self._plan.broker.store, knows_failure=self._knows_failure))

    def _await_workers(self) -> None:
        """Do nothing: workers on this machine were started, and without them the run ends by itself."""

    def _join(self) -> Assigned:
        """Take the script's place. Raises `RunFailed`."""
        try:
            return self._control.join(JOIN_TIMEOUT, workers_timeout=self._workers_timeout)
        except (BrokerUnreachable, Stopped) as error:
            raise self._failure(str(error), error.exit_code) from error

    def _drive(self, stack: ExitStack) -> Driver:
        sockets = stack.enter_context(tempfile.TemporaryDirectory(dir=self._processes.sockets))
        folder, assigned = Path(sockets), self._assigned
        driver: Driver | None = None

        def waiting(reason: str) -> None:
            if driver is not None:
                driver.lack_room(reason)

        queues = open_queues(self._plan, self._program, assigned, folder, waiting, pair=self._pair, wakes_at_once=True)
        start = self._position_of(assigned)
        commands = self._control.commands
        check, resumable = self._plan.data.check, self._plan.recovery.on
        self._batches = BatchRecord(self.folder, start.step, compares=check) if resumable else None
        driver = Driver(
            self._program,
            self._names,
            assigned,
            start,
            queues,
            commands,
            self._failure,
            self._batches,
            at_end=self._at_end,
        )
        here = self._reachable(queues.endpoint)
        keyed = self._pair is not None
        withheld, shows_code = withheld_by(self._plan, keyed=keyed), not all_withheld_by(self._plan, keyed=keyed)
        peek = Peeker(assigned.run, assigned.index, queues, withheld)
        self._control.start(
            assigned, here, driver.progress, steps=None, wake=queues.ring, views=Views(peek, shows_code=shows_code)
        )
        driver.begin()
        stack.callback(driver.close, CLOSE_TIMEOUT)
        stack.callback(self._at_end)
        return driver

    def _at_end(self) -> None:
        """Do nothing: the workers' snapshots tell the positions of a run on this machine."""

    def _position_of(self, assigned: Assigned) -> Position:
        """Return the position of the checkpoint, as one of its snapshots tells it. Raises `SnapshotDamaged`."""
        if not assigned.step:
            return Position()
        snapshots = SnapshotDirectory.of(runs.folder(self._plan, assigned.run), assigned.run, self._plan)
        return snapshots.load(0, assigned.step).position

    def _ask(self, what: str) -> Facts | None:
        """Return the facts of the broker's answer; None if it does not answer. For any thread."""
        return ask(self._processes.broker, what, self._pair)

    def _reachable(self, endpoint: str) -> str:
        return reachable(endpoint, self._processes.broker)

    def _failure(self, reason: str, code: int) -> RunFailed:
        return RunFailed(self._processes.killed or reason, code, self.folder)
