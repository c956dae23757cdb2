"""The broker process: finds the run in its store, serves it, and exits when the run has ended or on a signal.

serve_channel   receives messages, lets the coordinator decide, sends the coordinator's answers
StoreWait       while the run's records cannot be written or reached: reports this, and decides nothing

While the broker waits for its records, it answers queries. Messages that are sent only once are kept for later; all
others are repeated by their senders. Once the run is to stop, the wait soon ends, since nothing can be saved without
the records.
"""

import secrets
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from time import monotonic, time

import structlog

from stageline.broker.control.channel import Envelope, Received, ServerChannel
from stageline.broker.control.messages import CONTROL_VERSION, Answer, Ask, Exited, Failed, Goodbye, Refused, StopRun
from stageline.broker.control.protocol import KEY_BYTES, decode_to_broker, encode
from stageline.broker.control.records import RunLength
from stageline.broker.control.store import StoreUnusable
from stageline.broker.coordinator.coordinator import QUESTIONS, Coordinator
from stageline.broker.coordinator.records import EVERY
from stageline.broker.coordinator.run import RunConfig, RunOutcome, RunPhase, run_of
from stageline.broker.coordinator.state import Life, RunState
from stageline.broker.errors import BadMessage, BrokerError, ForeignMessage
from stageline.broker.rate_limit import RateLimit
from stageline.broker.transports.base import backend_of, open_server
from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import Plan
from stageline.pipeline.process.lifeline import Lifeline
from stageline.pipeline.process.signals import Signals
from stageline.pipeline.retry import TRIED, reason_of
from stageline.pipeline.schedule import Schedule
from stageline.workers.disk.atomic_file import keep_trying, persist_json
from stageline.workers.runs import folder as runs
from stageline.workers.runs.folder import result_of
from stageline.workers.runs.owner import record_end, write_owner
from stageline.workers.runs.records import earlier_run, open_store, read_code

MOST, LARGEST = 100, 2**16  # messages that are kept, and bytes of one
STOPPING = 2.0  # seconds that the records are waited for once the run is to stop

TURN = 0.05  # seconds that a turn waits for the first message
UNREADABLE = 20  # senders of what is no message that are answered in a turn
ANSWERED = 8 * 2**20  # bytes of answers to strangers in a second: they may ask for much, and not read it
LINGER = 30.0  # seconds that a broker stays after its run and its workers, to answer how it ended
LEAVING = 2.0  # seconds that it waits for the workers to leave after a stop request
STEP_END = 7.0  # seconds that it waits for workers which finish a step, and write a snapshot of it
_UNREADABLE = Refused(
    f"this is not a message of control protocol version {CONTROL_VERSION}, the only one this broker supports; "
    "install the same stageline on both sides",
    code=ExitCode.FAILED,
)

log = structlog.get_logger()


class StoreWait:
    """Callback of a store that cannot reach its records: answers queries while the store waits."""

    def __init__(self, channel: ServerChannel, signals: Signals) -> None:
        """Prepare for waits. Until `core` is set, queries go unanswered.

        Args:
            channel: Channel from which messages are received during a wait.
            signals: Counter of the process's signals; a signal ends a wait.
        """
        self.core: Coordinator | None = None  # who answers queries, once it is made
        self._channel = channel
        self._signals = signals
        self._told = False
        self._kept: list[Received] = []
        self._asked: set[bytes] = set()  # who was answered in this call
        self._ends: float | None = None  # of a run that is to stop: until when it is waited

    def __call__(self, reason: str) -> None:
        """Handle the messages that came; called by the store several times a second with the reason of its wait.

        Raises:
            StoreUnusable: A signal came, or the run was asked to stop a short time ago. The broker can only exit now.
        """
        if not self._told:
            log.warning("the broker waits for its records", reason=reason)
        self._told = True
        if self._ends is None and self.core is not None and self.core.is_interrupted:
            self._ends = monotonic() + STOPPING
        if self._signals.count or (self._ends is not None and monotonic() >= self._ends):
            lacking = reason.partition(TRIED)[0]
            raise StoreUnusable(
                f"interrupted while the broker waited for its records: {lacking}. Mend that, and resume the run"
            )
        if self.core is not None:
            self._asked.clear()
            with self.core.run.without_records(reason):
                for sender, frame in self._channel.receive(0.0) or ():
                    with suppress(BadMessage):
                        self._take(self.core, sender, frame or b"")

    def over(self) -> Sequence[Received]:
        """Return the messages kept during a wait, to be handled now, and note that the wait is over.

        Call it when the store has not waited, or no longer waits.
        """
        if self._told and self.core is not None:
            log.info("the broker keeps its records again")
            self._told = False
        kept, self._kept, self._ends = self._kept, [], None
        return kept

    def _take(self, core: Coordinator, sender: bytes, frame: bytes) -> None:
        message, seal = decode_to_broker(frame, core.is_proven)
        match message:
            case Ask() as ask if sender not in self._asked and len(self._asked) < QUESTIONS:
                self._asked.add(sender)
                recipient, answer = core.answer(sender, ask, time())
                self._channel.send([(recipient, encode(answer))])
            case Failed() | Goodbye() if len(self._kept) < MOST and len(frame) <= LARGEST:
                if core.is_proven(message.incarnation, seal):
                    self._kept.append((sender, frame))
            case StopRun() | Exited() if len(self._kept) < MOST and seal.is_of(core.run.keys.of_control):
                self._kept.append((sender, frame))
                if isinstance(message, StopRun) and not message.over:
                    self._ends = self._ends or monotonic() + STOPPING


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """Options of a broker process.

    Attributes:
        url: Address to serve at.
        run: Id of the run.
        lifeline: Pipe at whose end the broker exits.
        resume: True to continue the run, however it was stopped.
        new: True if no broker has served the run before.
        length: Length of the run, if it is known already.
    """

    url: str
    run: str
    lifeline: Lifeline = field(default_factory=Lifeline)
    resume: bool = False
    new: bool = False
    length: RunLength | None = None


def run_broker(plan: Plan, place: BrokerOptions, on_bound: Callable[[str], None] = lambda endpoint: None) -> int:
    """Serve the run until it has ended and its workers have exited; return the run's exit code.

    The run's records are where `broker.store` says: a broker of the same run continues where one was killed. Queues at
    a Redis server are removed from it once the run has finished. The first SIGINT or SIGTERM stops the run, the second
    ends the broker at once.

    Args:
        plan: Plan of the run.
        place: Options of the broker.
        on_bound: Called with the endpoint once the broker is bound to it.

    Raises:
        EndpointTaken: The address cannot be bound.
        OtherRun: The records hold a run of another plan that has not ended, or that is asked for by its id.
        StoreUnusable: The records cannot be reached or written.
        FolderUnusable: The folder for the run's files cannot be made.
        PlanRefused: The plan cannot be used.
        ModelRefused: The model of the plan cannot be used.
    """
    orphaned = Event()
    place.lifeline.end_process_when_cut(first=orphaned.set)
    plan, schedule = _scheduled(plan)
    folder = runs.make_folder(plan, place.run)
    signals = Signals()
    # First the address: a broker that does not get it must leave the records to the one that has it.
    with (
        closing(open_server(place.url)) as channel,
        closing(open_store(plan, place.run, wait := StoreWait(channel, signals))) as store,
    ):
        supervised = place.lifeline.supervised
        terms = replace(RunConfig.of(plan, schedule, place.length, read_code(folder)), supervised=supervised)
        if place.resume and not store.load().facts:  # else they tell of which plan the run is
            runs.require_same_plan(plan, folder)
        key = secrets.token_bytes(KEY_BYTES)
        run = run_of(store, terms.plan, place.run, key, new=place.new, resume=place.resume, alone=supervised)
        # Not before: another plan's broker must leave this run's alone.
        persist_json(folder / runs.PLAN, plan.as_mapping())
        core = wait.core = Coordinator(replace(terms, earlier=earlier_run(plan, run)), store, run, time())
        if not supervised:
            write_owner(folder, plan, "broker")
        host = _Host(core, plan, folder, orphaned, signals)
        address = partial(runs.write_broker_url, folder, channel.endpoint, core.run.keys.of_control)
        keep_trying(address, folder / runs.BROKER)
        try:
            on_bound(channel.endpoint)
            linger = 1.0 if supervised else LINGER
            serve_channel(core, channel, stop=host.should_exit, linger=linger, kept=wait.over)
            _clear_queues(core.run, plan.queues.url)
            core.keep_observation(time())
        except StoreUnusable as error:
            if not supervised:
                record_end(folder, error.exit_code, str(error))
            raise
        finally:
            runs.remove_broker_url(folder)
    return _exit_code(run, core.run.outcome)


def serve_channel(
    coordinator: Coordinator,
    channel: ServerChannel,
    *,
    stop: Callable[[], bool] = lambda: False,
    linger: float = LINGER,
    kept: Callable[[], Sequence[Received]] = tuple,
) -> None:
    """Serve until `stop()` is true, or until the run is over and the broker is no longer needed.

    Args:
        coordinator: Decides how messages are answered.
        channel: Channel of the broker.
        stop: Called about twenty times a second.
        linger: Seconds to stay after the run for commands that ask about it.
        kept: Returns the messages that came while the store waited.

    Raises:
        StoreUnusable: The records cannot be reached or written.
    """
    clock, departure = _wall_clock(), _Departure(coordinator, linger)
    answers = RateLimit(ANSWERED)
    while not (stop() or departure.is_due()):
        received = channel.receive(TURN)
        if received is not None:  # else the coordinator learns from its next turn that it was away
            _turn(coordinator, channel, [*kept(), *received], clock, answers)


def _wall_clock() -> Callable[[], float]:
    """Return a clock that gives seconds since the epoch and is never set back.

    The epoch time is read once; from then on a monotonic clock is added to it.
    """
    offset = time() - monotonic()
    return lambda: monotonic() + offset


def _turn(
    coordinator: Coordinator,
    channel: ServerChannel,
    received: Sequence[Received],
    clock: Callable[[], float],
    answers: RateLimit,
) -> None:
    sends: list[Envelope] = []
    strangers: dict[bytes, None] = {}  # in order
    for sender, frame in received:
        try:
            reception = coordinator.receive(sender, decode_to_broker(frame or b"", coordinator.is_proven), clock())
        except ForeignMessage:
            strangers[sender] = None
        except BadMessage as error:  # its sender repeats what matters
            coordinator.run.events.count("damaged", f"dropped: {error}")
        else:
            said = coordinator.envelopes(reception.outgoing, clock())
            if reception.trusted:
                channel.trust(sender)
            if reception.trusted or answers.allows(clock(), sum(len(message) for _, message in said)):
                sends += said
    sends += coordinator.envelopes([(sender, _UNREADABLE) for sender in list(strangers)[:UNREADABLE]], clock())
    sends += coordinator.envelopes(coordinator.tick(clock()), clock())
    channel.send(sends)
    events = coordinator.run.events
    for warning in events.warnings:  # first: the other lines often follow from them
        log.warning(warning)
    for line in events.infos:
        log.info(line)
    events.infos.clear()
    events.warnings.clear()


class _Departure:
    """Decision when the broker is no longer needed."""

    def __init__(self, coordinator: Coordinator, linger: float) -> None:
        self._coordinator = coordinator
        self._run = coordinator.run
        self._linger = linger
        self._over: float | None = None  # since when

    def is_due(self) -> bool:
        """Return True once the run is over and the workers have left and been heard, or the time to linger is over."""
        outcome = self._run.outcome
        if outcome is None:
            return False
        if self._over is None:
            self._over = monotonic()
        dismissed = self._run.lifecycle.state is Life.DISMISSED and self._run.all_left and self._run.all_heard
        return dismissed or monotonic() - self._over >= self._patience(outcome)

    def _patience(self, outcome: RunOutcome) -> float:
        """Return the seconds for which the broker stays after the run."""
        if outcome.at_step_end and not self._run.all_left:
            return STEP_END
        return min(LEAVING, self._linger) if self._coordinator.stop_requested else self._linger


def _scheduled(plan: Plan) -> tuple[Plan, Schedule]:
    """Return the plan with its number of stages, and its schedule.

    The model is loaded only if the plan does not tell the number of stages.
    """
    if plan.model.stages is None:
        from stageline.workers.runtime.job import prepare_model

        job = prepare_model(plan)
        return job.plan, job.schedule
    plan.demand_cut()
    return plan, plan.make_schedule()


def _clear_queues(run: RunState, url: str) -> None:
    """Remove a finished run's queues from their server.

    The queues of a stopped run stay, since they are needed to continue it.
    """
    backend = backend_of(url)
    if not backend.has_server or run.phase is not RunPhase.FINISHED:
        return
    reason = "not every worker has exited"  # one that still runs could put again what it keeps
    if run.all_left:
        try:
            backend.forget(url, run.id)
            return
        except BrokerError as error:
            reason = str(error)
    log.warning(
        "the queues stay at the server",
        address=masked(url),
        reason=reason,
        remove=f"{backend.forget_by_hand(run.id)}, once all workers have exited",
    )


def _exit_code(run: str, outcome: RunOutcome | None) -> int:
    if outcome is None:
        log.error("left", reason=f"run {run} has not ended; start a broker with --run {run} to go on")
        return ExitCode.INTERRUPTED
    if outcome.code:
        log.error("the run has failed", reason=outcome.reason)
    return outcome.code


class _Host:
    """The process around the coordinator: obeys signals, watches the lifeline, and writes the run's files."""

    def __init__(self, core: Coordinator, plan: Plan, folder: Path, orphaned: Event, signals: Signals) -> None:
        self._core = core
        self._plan = plan
        self._folder = folder
        self._orphaned = orphaned  # the process that started this one is gone
        self._signals = signals
        self._started = self._observed = monotonic()
        self._over = core.run.outcome is not None

    def should_exit(self) -> bool:
        """Return True if the broker is to exit at once; called in every turn.

        After a first signal the run is stopped; workers learn of it with their next report. A run that is over does not
        keep the broker running after a signal.
        """
        if self._signals.count and self._core.run.lifecycle.state is not Life.DISMISSED:
            self._core.handle(b"", StopRun("the broker was interrupted"), time())
        if not self._over and self._core.run.outcome is not None:
            self._over = True
            self._observed = 0.0  # the end is to be found in the records at once
            self._keep_result()
        if monotonic() - self._observed >= EVERY:
            self._observed = monotonic()
            self._core.keep_observation(time())
        return self._signals.count > 1 or self._orphaned.is_set()

    def _keep_result(self) -> None:
        for _, answer in self._core.handle(b"", Ask("status"), time()):
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
