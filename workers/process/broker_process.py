"""The broker process: serves the run in its store until the run has ended, or a signal comes.

serve_channel   receives messages, lets the gate and the coordinator decide, sends their answers
Entrance        who may connect, and say what: `entrance.py`
BrokerHost      signals, and the run's files: `broker_host.py`
StoreWait       while the run's records cannot be written or reached: `broker_host.py`
"""

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from time import monotonic, thread_time

import structlog

from stageline.broker.control.channel import Envelope, Received, ServerChannel
from stageline.broker.control.messages import CONTROL_VERSION, Refused
from stageline.broker.control.protocol import KEY_BYTES, decode_to_broker
from stageline.broker.control.records import RunLength
from stageline.broker.control.store import StoreUnusable
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.gate import Gatekeeper, KeyEvent, OpenGate
from stageline.broker.coordinator.place_keys import shut_out
from stageline.broker.coordinator.run import RunConfig, RunOutcome, RunPhase, run_of
from stageline.broker.coordinator.state import Life, RunState
from stageline.broker.errors import BadMessage, BrokerError, ForeignMessage
from stageline.broker.keys.changes import KeyChangeFailed
from stageline.broker.keys.parties import Parties, parties_of
from stageline.broker.rate_limit import RateLimit
from stageline.broker.transports.base import backend_of, open_server
from stageline.pipeline.addresses import masked
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import Plan, PlanRefused
from stageline.pipeline.process.lifeline import Lifeline
from stageline.pipeline.process.signals import Signals
from stageline.pipeline.process.steady_clock import STEADY
from stageline.pipeline.schedule import Schedule
from stageline.workers.control.questions import Questions
from stageline.workers.disk.atomic_file import keep_trying, persist_json
from stageline.workers.runs import folder as runs
from stageline.workers.runs.owner import record_end, write_owner
from stageline.workers.runs.records import earlier_run, open_store, read_code

from .broker_host import BrokerHost, StoreWait
from .entrance import Entrance, KeyLog

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
        reread: Reads the plan again; None for a broker without a plan file of its own.
        questions: Questions of this process's other threads.
    """

    url: str
    run: str
    lifeline: Lifeline = field(default_factory=Lifeline)
    resume: bool = False
    new: bool = False
    length: RunLength | None = None
    reread: Callable[[], Plan] | None = None
    questions: Questions = field(default_factory=Questions)


def run_broker(
    plan: Plan, place: BrokerOptions, on_bound: Callable[[str, str], None] = lambda endpoint, line: None
) -> int:
    """Serve the run until it has ended and its workers have exited; return the run's exit code.

    The run's records are where `broker.store` says: a broker of the same run continues where one was killed. Queues at
    a Redis server are removed from it once the run has finished. The first SIGINT or SIGTERM stops the run, the second
    ends the broker at once.

    Args:
        plan: Plan of the run.
        place: Options of the broker.
        on_bound: Called once the broker is bound: with its endpoint, and with the line by which other machines join, ""
            if they need none.

    Raises:
        EndpointTaken: The address cannot be bound.
        OtherRun: The records hold a run of another plan that has not ended, or that is asked for by its id.
        StoreUnusable: The records cannot be reached or written.
        FolderUnusable: The folder for the run's files cannot be made.
        PlanRefused: The plan cannot be used.
        ModelRefused: The model of the plan cannot be used.
        KeyUnusable: The broker has keys, and the user's key file cannot be made or read.
    """
    orphaned = Event()
    place.lifeline.end_process_when_cut(first=orphaned.set)
    plan, schedule = _scheduled(plan)
    folder = runs.make_folder(plan, place.run)
    signals, entrance = Signals(), Entrance.of(plan, place.url, os.environ)
    # First the address: a broker that does not get it must leave the records to the one that has it.
    with (
        closing(open_server(place.url, entrance.keys)) as channel,
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
        opened = entrance.open(store, run, supervised=supervised, parties=parties_of(plan))
        terms = replace(terms, earlier=earlier_run(plan, run), access=opened.access)
        core = Coordinator(terms, store, run, STEADY.time(), thread_time)
        wait.serve(core, gate := opened.gate(core, partial(_listed, place.reread, plan)))
        if not supervised:
            write_owner(folder, plan, "broker")
        host = BrokerHost(core, plan, folder, orphaned, signals, place.questions)
        address = partial(runs.write_broker_url, folder, channel.endpoint, core.run.keys.of_control)
        keep_trying(address, folder / runs.BROKER)
        try:
            on_bound(channel.endpoint, opened.join_line(channel.endpoint))
            linger = 1.0 if supervised else LINGER
            note = KeyLog(folder).note
            serve_channel(core, channel, stop=host.should_exit, linger=linger, kept=wait.over, gate=gate, note=note)
            _clear_queues(core.run, plan.queues.url)
            core.keep_observation(STEADY.time(), STEADY.behind())
        except StoreUnusable as error:
            if not supervised:
                record_end(folder, error.exit_code, str(error))
            raise
        finally:
            runs.remove_broker_url(folder)
    return _exit_code(run, core.run.outcome)


def _listed(reread: Callable[[], Plan] | None, plan: Plan) -> Parties:
    """Return the parties of a plan as its file has them now. Raises `KeyChangeFailed`."""
    if reread is None:
        raise KeyChangeFailed(
            "this broker has no plan file to read again: `stageline broker` with a plan is one that has. Start the run "
            "again with other parties"
        )
    try:
        return parties_of(reread().with_stages(plan.model.stages or len(plan.workers)))
    except PlanRefused as error:
        raise KeyChangeFailed(str(error)) from error


def serve_channel(
    coordinator: Coordinator,
    channel: ServerChannel,
    *,
    stop: Callable[[], bool] = lambda: False,
    linger: float = LINGER,
    kept: Callable[[], Sequence[Received]] = tuple,
    gate: Gatekeeper | None = None,
    note: Callable[[Sequence[KeyEvent]], None] = lambda events: None,
) -> None:
    """Serve until `stop()` is true, or until the run is over and the broker is no longer needed.

    Args:
        coordinator: Decides how messages are answered.
        channel: Channel of the broker.
        stop: Called about twenty times a second.
        linger: Seconds to stay after the run for commands that ask about it.
        kept: Returns the messages that passed the gate while the store waited.
        gate: Decides which messages pass to the coordinator; None: all do.
        note: Called with what has become of keys.

    Raises:
        StoreUnusable: The records cannot be reached or written.
    """
    clock, departure = STEADY.time, _Departure(coordinator, linger)
    answers, gate = RateLimit(ANSWERED), gate or OpenGate()
    while not (stop() or departure.is_due()):
        received = channel.receive(TURN)
        if received is None:  # the coordinator learns from its next turn that it was away
            continue
        found = gate.sort(received, channel.key_of, clock())
        channel.send(found.answers)
        note(found.events)
        refusals = _turn(coordinator, channel, [*kept(), *found.passed], clock, answers)
        note(gate.told(refusals, channel.key_of, clock()))
        if found.readmit:
            sends = shut_out(coordinator.run, found.revoked.__contains__, clock())
            channel.send(coordinator.envelopes(sends, clock()))
            channel.readmit()


def _turn(
    coordinator: Coordinator,
    channel: ServerChannel,
    received: Sequence[Received],
    clock: Callable[[], float],
    answers: RateLimit,
) -> list[tuple[bytes, str]]:
    """Have the coordinator decide on the messages of a turn; return the senders of those that do not count, and why."""
    sends: list[Envelope] = []
    strangers: dict[bytes, None] = {}  # in order
    refusals: list[tuple[bytes, str]] = []
    for sender, frame in received:
        try:
            reception = coordinator.receive(sender, decode_to_broker(frame or b"", coordinator.is_proven), clock())
        except ForeignMessage:
            strangers[sender] = None
        except BadMessage as error:  # its sender repeats what matters
            coordinator.run.events.count("damaged", f"dropped: {error}")
            refusals.append((sender, str(error)))
        else:
            said = coordinator.envelopes(reception.outgoing, clock())
            if reception.trusted:
                channel.trust(sender)
            if reception.trusted or answers.allows(clock(), sum(len(message) for _, message in said)):
                sends += said
            if reception.refusal:
                refusals.append((sender, reception.refusal))
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
    return refusals + [(sender, "it sends what is no control message of this version") for sender in strangers]


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
