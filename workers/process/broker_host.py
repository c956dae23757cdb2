"""The process around a coordinator: it obeys signals, waits for the store, and writes files."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event
from time import monotonic

import structlog

from stageline.broker.control.channel import Received, ServerChannel
from stageline.broker.control.messages import Answer, Ask, Exited, Failed, Goodbye, StopRun
from stageline.broker.control.protocol import decode_to_broker, encode
from stageline.broker.control.store import StoreUnusable
from stageline.broker.coordinator.coordinator import QUESTIONS, Coordinator
from stageline.broker.coordinator.gate import Gatekeeper, OpenGate
from stageline.broker.coordinator.records import EVERY
from stageline.broker.coordinator.state import Life
from stageline.broker.errors import BadMessage
from stageline.pipeline.plan import Plan
from stageline.pipeline.process.signals import Signals
from stageline.pipeline.process.steady_clock import STEADY, SteadyClock
from stageline.pipeline.retry import TRIED, reason_of
from stageline.workers.control.questions import Questions
from stageline.workers.disk.atomic_file import persist_json
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import result_of

log = structlog.get_logger()
MOST, LARGEST = 100, 2**16  # messages that are kept, and bytes of one
STOPPING = 2.0  # seconds that the records are waited for once the run is to stop
_SET = 0.5  # seconds by which the system's clock is set at least, for people to be told
log = structlog.get_logger()


class BrokerHost:
    """Host of a coordinator, asked in every turn of the broker."""

    def __init__(
        self,
        core: Coordinator,
        plan: Plan,
        folder: Path,
        orphaned: Event,
        signals: Signals,
        questions: Questions,
        clock: SteadyClock = STEADY,
    ) -> None:
        """Host `core`.

        Args:
            core: Coordinator of the run.
            plan: Plan of the run.
            folder: Folder of the run.
            orphaned: Set once the process that started this one is gone.
            signals: Counter of the process's signals.
            questions: Questions of this process's other threads.
            clock: Clock of the run.
        """
        self._core = core
        self._plan = plan
        self._folder = folder
        self._orphaned = orphaned
        self._signals = signals
        self._questions = questions
        self._started = self._observed = monotonic()
        self._over = core.run.outcome is not None
        self._clock, self._behind = clock, clock.behind()

    def should_exit(self) -> bool:
        """Return True if the broker is to exit at once; called in every turn.

        After a first signal the run is stopped; workers learn of it with their next report. A run that is over does not
        keep the broker running after a signal.
        """
        now = self._clock.time()
        if self._signals.count and self._core.run.lifecycle.state is not Life.DISMISSED:
            self._core.handle(b"", StopRun("the broker was interrupted"), now)
        if not self._over and self._core.run.outcome is not None:
            self._over = True
            self._observed = 0.0  # the end is to be found in the records at once
            self._keep_result()
        if monotonic() - self._observed >= EVERY:
            self._observed = monotonic()
            behind = self._clock.behind()
            self._core.keep_observation(now, behind)
            self._tell_set(behind)
        self._questions.answer(self._core, now)
        return self._signals.count > 1 or self._orphaned.is_set()

    def _tell_set(self, behind: float) -> None:
        """Log that the system's clock was set, once for each time."""
        if abs(change := behind - self._behind) >= _SET:
            self._behind = behind
            way = "forward" if change > 0 else "back"
            log.warning(f"the clock of this machine was set {way} by {abs(change):.1f} s: the run keeps to its own")

    def _keep_result(self) -> None:
        for _, answer in self._core.handle(b"", Ask("status"), self._clock.time()):
            if isinstance(answer, Answer) and answer.facts["weights_sha256"] and answer.facts["training_steps"]:
                run, seconds = self._core.run.id, monotonic() - self._started
                result, file = (
                    result_of(run, self._plan.schedule.in_step, answer.facts, seconds),
                    self._folder / runs.RESULT,
                )
                try:
                    persist_json(file, result)
                except OSError as error:  # the run has ended well, and the records say so
                    log.error("the result is not kept", reason=f"{file} cannot be written: {reason_of(error)}")
                else:
                    log.info("result", weights_sha256=result.weights_sha256, file=file)


class StoreWait:
    """Wait of a broker for its records: a callback of the store while these cannot be written or reached.

    The broker decides nothing, but answers queries. Messages that are sent only once are kept for later; all others are
    repeated by their senders. Once the run is to stop, the wait soon ends, since nothing can be saved without the
    records.
    """

    def __init__(self, channel: ServerChannel, signals: Signals) -> None:
        """Prepare for waits. Until `serve`, queries go unanswered.

        Args:
            channel: Channel from which messages are received during a wait.
            signals: Counter of the process's signals; a signal ends a wait.
        """
        self._core: Coordinator | None = None  # who answers queries, once it is made
        self._gate: Gatekeeper = OpenGate()
        self._channel = channel
        self._signals = signals
        self._told = False
        self._kept: list[Received] = []
        self._asked: set[bytes] = set()  # who was answered in this call
        self._ends: float | None = None  # of a run that is to stop: until when it is waited

    def serve(self, core: Coordinator, gate: Gatekeeper) -> None:
        """Have `core` answer the queries that pass `gate` from now on."""
        self._core, self._gate = core, gate

    def __call__(self, reason: str) -> None:
        """Handle the messages that came; called by the store several times a second with the reason of its wait.

        Raises:
            StoreUnusable: A signal came, or the run was asked to stop a short time ago. The broker can only exit now.
        """
        if not self._told:
            log.warning("the broker waits for its records", reason=reason)
        self._told = True
        if self._ends is None and self._core is not None and self._core.is_interrupted:
            self._ends = monotonic() + STOPPING
        if self._signals.count or (self._ends is not None and monotonic() >= self._ends):
            lacking = reason.partition(TRIED)[0]
            raise StoreUnusable(
                f"interrupted while the broker waited for its records: {lacking}. Mend that, and resume the run"
            )
        if self._core is not None:
            self._asked.clear()
            with self._core.run.without_records(reason):
                received = self._channel.receive(0.0) or ()
                for sender, frame in self._gate.passed(received, self._channel.key_of):
                    with suppress(BadMessage):
                        self._take(self._core, sender, frame or b"")

    def over(self) -> Sequence[Received]:
        """Return the messages kept during a wait, to be handled now, and note that the wait is over.

        Call it when the store has not waited, or no longer waits.
        """
        if self._told and self._core is not None:
            log.info("the broker keeps its records again")
            self._told = False
        kept, self._kept, self._ends = self._kept, [], None
        return kept

    def _take(self, core: Coordinator, sender: bytes, frame: bytes) -> None:
        message, seal = decode_to_broker(frame, core.is_proven)
        match message:
            case Ask() as ask if sender not in self._asked and len(self._asked) < QUESTIONS:
                self._asked.add(sender)
                recipient, answer = core.answer(sender, ask, STEADY.time())
                self._channel.send([(recipient, encode(answer))])
            case Failed() | Goodbye() if len(self._kept) < MOST and len(frame) <= LARGEST:
                if core.is_proven(message.incarnation, seal):
                    self._kept.append((sender, frame))
            case StopRun() | Exited() if len(self._kept) < MOST and seal.is_of(core.run.keys.of_control):
                self._kept.append((sender, frame))
                if isinstance(message, StopRun) and not message.over:
                    self._ends = self._ends or monotonic() + STOPPING
