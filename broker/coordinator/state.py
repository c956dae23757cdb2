"""The state of a run: one table of the states of its life and the events that move it, and one value with all parts.

STARTING ──> RECONNECTING ──┬──> RECONCILING ──┬──> CHOOSING_CHECKPOINT
    │             │         │         │        │             │
    └─────────────┴─────────┴─────────┴────────┴─────────────┴──> WAITING ──> RUNNING ──> STOPPING
                                                                      (all present)   (stop requested)

RECONCILING is also entered from every later state of a run that is not over, when a worker proves the records lost or
stale. From there the run continues at WAITING, as after every restart.

RUNNING, STOPPING ──(all workers finished)──────────> FINISHED ──┐
any but STARTING and RUNNING ──(its stop is due)────> STOPPED  ──┼──(another stop request)──> DISMISSED
any that is not over ──(failure)────────────────────> FAILED   ──┘

From the records, STARTING reaches FINISHED and FAILED too; so do RECONNECTING and WAITING reach FINISHED, by reports of
workers that finished while the broker was away.

The policies (registration, restart, supervision, shutdown, pausing, ...) are functions of `RunState`, an event and
the time. Each names the parts that it reads and writes. The messages that they send are collected in
`RunState.outgoing`.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from stageline.broker.control.checkpoints import Trim
from stageline.broker.control.leaves import LeaveWorker
from stageline.broker.control.messages import Declined, FromBroker, Hello
from stageline.broker.control.protocol import RunKeys
from stageline.broker.control.records import LONGEST_NAME, RunLength
from stageline.broker.control.store import Store
from stageline.broker.ledger.checkpoint_tracker import CheckpointTracker
from stageline.broker.ledger.copies import CopyBook
from stageline.broker.ledger.counters import RunCounters
from stageline.broker.ledger.evaluations import Evaluations
from stageline.broker.ledger.ledger import Ledger, QueueDigests
from stageline.broker.ledger.losses import Replacements, StandbyWorkers, Standstill
from stageline.broker.ledger.member import MemberStatus
from stageline.broker.ledger.milestones import Milestones
from stageline.broker.ledger.orders import OrderBook
from stageline.broker.ledger.pauses import PauseBook
from stageline.broker.ledger.recovery import LostAttempt, StartSearch
from stageline.broker.ledger.registry import Registry
from stageline.broker.ledger.script import ScriptMember, script_among
from stageline.broker.ledger.trend import Trend
from stageline.broker.slowness.pace import RunPace
from stageline.pipeline.evaluation import Rounds, Standing

from .kept_answer import KeptAnswer
from .run import RunConfig, RunOutcome, RunPhase, StopPlan

LOGGED, PERIOD = 20, 10.0  # anomalies of one kind that become warnings, in so many seconds; all are counted
DECLINED = 8  # newest processes that did not join
KEPT_LOSSES = 64  # newest lost attempts of a run, one for each stage of a lost worker: written with every checkpoint

Outgoing = tuple[bytes, FromBroker]  # recipient, message


class Life(StrEnum):
    """A state of a run's life, which determines what the broker does for the run."""

    STARTING = "starting"  # reading the stored records
    RECONNECTING = "reconnecting"  # after a broker restart: workers that still run have one lease to reconnect
    RECONCILING = "reconciling"  # the records are lost or stale: collecting what the workers and the disks know
    CHOOSING_CHECKPOINT = "choosing checkpoint"  # a resumed run: workers verify their snapshots before they are placed
    WAITING = "waiting"  # for workers of the plan that have not joined yet
    RUNNING = "running"
    STOPPING = "stopping"  # a stop was requested; the step that all stages can stop after is not known yet
    STOPPED = "stopped"  # on request; workers may still report newer snapshots
    FINISHED = "finished"  # all steps are done
    FAILED = "failed"
    DISMISSED = "dismissed"  # over, and nothing is left for the broker to do


class RunEvent(StrEnum):
    """An event that moves a run from one state to the next."""

    BROKER_RESTARTED = "broker restarted"  # to resume a run without a recorded end
    RECORDS_LOST = "records lost"  # or older than the run
    CHECKPOINT_UNVERIFIED = "checkpoint unverified"  # every stage starts at a checkpoint that has not been read back
    START_KNOWN = "start known"  # at which step each stage starts: places may be given
    ALL_PRESENT = "all present"  # every worker of the plan has joined
    STOP_REQUESTED = "stop requested"
    STOP_DUE = "stop due"
    ALL_FINISHED = "all finished"
    FAILURE = "failure"


class IllegalRunEvent(Exception):
    """The error that an event cannot happen in the run's state: a bug in the coordinator."""


OVER = frozenset({Life.STOPPED, Life.FINISHED, Life.FAILED, Life.DISMISSED})

_S, _E = Life, RunEvent

TRANSITIONS: Mapping[tuple[Life, RunEvent], Life] = {
    (_S.STARTING, _E.BROKER_RESTARTED): _S.RECONNECTING,
    (_S.STARTING, _E.RECORDS_LOST): _S.RECONCILING,
    (_S.STARTING, _E.CHECKPOINT_UNVERIFIED): _S.CHOOSING_CHECKPOINT,
    (_S.STARTING, _E.START_KNOWN): _S.WAITING,
    (_S.STARTING, _E.ALL_FINISHED): _S.FINISHED,  # so the records say
    (_S.STARTING, _E.FAILURE): _S.FAILED,  # likewise, and of a stopped run too
    (_S.RECONNECTING, _E.RECORDS_LOST): _S.RECONCILING,
    (_S.RECONNECTING, _E.CHECKPOINT_UNVERIFIED): _S.CHOOSING_CHECKPOINT,
    (_S.RECONNECTING, _E.START_KNOWN): _S.WAITING,
    (_S.RECONNECTING, _E.STOP_REQUESTED): _S.RECONNECTING,
    (_S.RECONNECTING, _E.STOP_DUE): _S.STOPPED,
    (_S.RECONNECTING, _E.ALL_FINISHED): _S.FINISHED,
    (_S.RECONNECTING, _E.FAILURE): _S.FAILED,
    (_S.RECONCILING, _E.CHECKPOINT_UNVERIFIED): _S.CHOOSING_CHECKPOINT,
    (_S.RECONCILING, _E.START_KNOWN): _S.WAITING,
    (_S.RECONCILING, _E.STOP_REQUESTED): _S.RECONCILING,
    (_S.RECONCILING, _E.STOP_DUE): _S.STOPPED,
    (_S.RECONCILING, _E.FAILURE): _S.FAILED,
    (_S.CHOOSING_CHECKPOINT, _E.RECORDS_LOST): _S.RECONCILING,
    (_S.CHOOSING_CHECKPOINT, _E.START_KNOWN): _S.WAITING,
    (_S.CHOOSING_CHECKPOINT, _E.STOP_REQUESTED): _S.CHOOSING_CHECKPOINT,
    (_S.CHOOSING_CHECKPOINT, _E.STOP_DUE): _S.STOPPED,
    (_S.CHOOSING_CHECKPOINT, _E.FAILURE): _S.FAILED,
    (_S.WAITING, _E.RECORDS_LOST): _S.RECONCILING,
    (_S.WAITING, _E.ALL_PRESENT): _S.RUNNING,
    (_S.WAITING, _E.STOP_REQUESTED): _S.WAITING,
    (_S.WAITING, _E.STOP_DUE): _S.STOPPED,
    (_S.WAITING, _E.ALL_FINISHED): _S.FINISHED,  # workers that never named an endpoint
    (_S.WAITING, _E.FAILURE): _S.FAILED,
    (_S.RUNNING, _E.RECORDS_LOST): _S.RECONCILING,
    (_S.RUNNING, _E.STOP_REQUESTED): _S.STOPPING,
    (_S.RUNNING, _E.ALL_FINISHED): _S.FINISHED,
    (_S.RUNNING, _E.FAILURE): _S.FAILED,
    (_S.STOPPING, _E.RECORDS_LOST): _S.RECONCILING,
    (_S.STOPPING, _E.STOP_REQUESTED): _S.STOPPING,
    (_S.STOPPING, _E.STOP_DUE): _S.STOPPED,
    (_S.STOPPING, _E.ALL_FINISHED): _S.FINISHED,
    (_S.STOPPING, _E.FAILURE): _S.FAILED,
    (_S.STOPPED, _E.STOP_REQUESTED): _S.DISMISSED,
    (_S.FINISHED, _E.STOP_REQUESTED): _S.DISMISSED,
    (_S.FAILED, _E.STOP_REQUESTED): _S.DISMISSED,
    (_S.DISMISSED, _E.STOP_REQUESTED): _S.DISMISSED,
}


class RunLifecycle:
    """The state of a run's life, which only `move` changes."""

    def __init__(self) -> None:
        """Begin at STARTING."""
        self.state = Life.STARTING

    @property
    def over(self) -> bool:
        """True once the run has ended."""
        return self.state in OVER

    def allows(self, event: RunEvent) -> bool:
        """Return True if `event` can happen now."""
        return (self.state, event) in TRANSITIONS

    def move(self, event: RunEvent) -> None:
        """Enter the state that `event` leads to. Raises `IllegalRunEvent` if `event` cannot happen now."""
        if not self.allows(event):
            raise IllegalRunEvent(f"{event!s} cannot happen to a run that is {self.state!s}")
        self.state = TRANSITIONS[self.state, event]


class EventLog:
    """The log lines since the reader last cleared them, with counts of each kind of anomaly."""

    def __init__(self) -> None:
        """Start with no lines and no counts."""
        self.infos: list[str] = []
        self.warnings: list[str] = []
        self.anomalies: Counter[str] = Counter()
        self._lately: Counter[str] = Counter()
        self._once: set[str] = set()
        self._since = 0.0

    def count(self, kind: str, line: str) -> None:
        """Count an unexpected and harmless event of a `kind`; log the first LOGGED of a kind in each period."""
        self.anomalies[kind] += 1
        self._lately[kind] += 1
        if self._lately[kind] <= LOGGED:
            self.warnings.append(line)

    def count_once(self, kind: str, line: str) -> None:
        """Count an anomaly that an attacker may repeat; log each distinct line once."""
        self.anomalies[kind] += 1
        if line not in self._once:
            self._once.add(line)
            self.warnings.append(line)

    def turn(self, now: float) -> None:
        """Log how many anomalies were counted but not logged, and begin a new period, once every PERIOD seconds.

        Call it several times a second. `now` is in seconds since the epoch.
        """
        if now - self._since < PERIOD:
            return
        withheld = ((kind, count - LOGGED) for kind, count in self._lately.items() if count > LOGGED)
        self.warnings += [f"{kind}: {count} more in the last {now - self._since:.0f} s" for kind, count in withheld]
        self._lately.clear()
        self._since = now


@dataclass(frozen=True, slots=True)
class PendingPeek:
    """Question of `sender` that waits for the worker of an incarnation, until a time in seconds since the epoch."""

    sender: bytes
    what: str
    incarnation: int
    label: str
    until: float


@dataclass(slots=True)
class RunState:
    """A run as its broker knows it, made by `records.restored`. Times are seconds since the epoch."""

    id: str
    config: RunConfig
    store: Store  # what must survive a crash is stored before it is sent
    keys: RunKeys
    adopted: bool  # see `RunIdentity`
    registry: Registry  # who has which place
    ledger: Ledger  # how far each stage has come
    checkpoints: CheckpointTracker
    replacements: Replacements
    evaluations: Evaluations
    orders: OrderBook  # of a run that chooses its schedule
    search: StartSearch  # for the step that stages begin at, before places are given
    standstill: Standstill
    lost_work: deque[LostAttempt]
    milestones: Milestones
    outcome: RunOutcome | None
    length: RunLength | None  # once it is known; for workers that have no data
    trend: Trend  # memory and retained messages of the workers
    pauses: PauseBook = field(default_factory=PauseBook)
    leaves: dict[int, tuple[LeaveWorker, float]] = field(default_factory=dict)  # by incarnation: asked for, and when
    told_steps: int | None = None  # how many steps the run trains, as a worker has told
    lifecycle: RunLifecycle = field(default_factory=RunLifecycle)
    stopping: StopPlan = field(default_factory=StopPlan)
    digests: QueueDigests = field(default_factory=QueueDigests)  # of messages that lie at a server
    standby: StandbyWorkers = field(default_factory=StandbyWorkers)
    unsupported: dict[int, float] = field(default_factory=dict)  # incarnation: since when it says it has finished
    declined: deque[Declined] = field(default_factory=lambda: deque(maxlen=DECLINED))
    events: EventLog = field(default_factory=EventLog)
    peeks: dict[int, PendingPeek] = field(default_factory=dict)  # questions that were passed on, by their numbers
    fault: str = ""  # what the broker itself cannot do for now, continuing "the broker"
    copies: CopyBook = field(default_factory=CopyBook)  # transfers of snapshots between workers
    pace: RunPace = field(default_factory=RunPace)  # the times of the newest steps
    counters: RunCounters = field(default_factory=RunCounters)  # since this broker began
    slowness: KeptAnswer = field(default_factory=KeptAnswer)  # the newest answer to why the run is slow
    outgoing: list[Outgoing] = field(default_factory=list)  # messages that the present decision sends

    @property
    def phase(self) -> RunPhase:
        """The progress of the run, as users see it."""
        if self.outcome is not None:
            return self.outcome.phase
        return RunPhase.RUNNING if self.registry.begun else RunPhase.WAITING

    @property
    def script(self) -> ScriptMember | None:
        """The script's member, or None if the run has no script or it is not there."""
        return script_among(self.registry.members.values())

    @property
    def all_left(self) -> bool:
        """True if no worker has anything left to report."""
        return all(member.status is not MemberStatus.PRESENT for member in self.registry.members.values())

    @property
    def all_heard(self) -> bool:
        """True if every worker has contacted this broker.

        In a finished run that a former broker served, a worker that was not told of the end may still make contact.
        """
        return all(member.sender for member in self.registry.members.values())

    @property
    def saving(self) -> bool:
        """True while workers of a stopped run may still finish a step and write its snapshot."""
        stops = self.outcome is not None and self.outcome.at_step_end
        workers = self.registry.reachable_workers()
        return stops and any(member.status is MemberStatus.PRESENT for member in workers)

    @property
    def trimmable(self) -> int:
        """The step before which neither a worker nor a replacement needs a message."""
        return self.checkpoints.announced if self.config.snapshots else self.ledger.finished_floor

    @property
    def rounds(self) -> Rounds | None:
        """The rounds of evaluation of the run; None while its length is not known."""
        every, length = self.config.evaluates_every, self.length
        if length is None:
            return None
        return Rounds(length.training, length.evaluation, length.epoch if every == "epoch" else every)

    @property
    def early_end(self) -> Standing | None:
        """The standing of the run when it ended early; None if it did not end early."""
        standing = self.evaluations.standing()
        early = standing is not None and (self.length is None or standing.step < self.length.training)
        return standing if standing is not None and standing.stops and early else None

    @property
    def training_steps(self) -> int | None:
        """The number of steps after which the run has finished; None before a worker that has the data has come."""
        if (early := self.early_end) is not None:
            return early.step
        return self.told_steps if self.length is None else self.length.training

    def announcement(self, step: int) -> Trim | None:
        """Return the message that lets workers drop all that comes before the complete checkpoint of `step`.

        Snapshots of the best round of evaluation before it stay. Returns None as long as that round is not known.
        """
        return self.evaluations.trim(step, self.rounds) if self.config.keeps_best else Trim(step)

    def broadcast(self, message: FromBroker) -> None:
        """Send `message` to every reachable worker with a place."""
        self.outgoing += [(member.sender, message) for member in self.registry.reachable() if member.sender]

    def note_declined(self, host: str, pid: int, reason: str) -> None:
        """Note that a process does not become a worker.

        Args:
            host: The process's host.
            pid: The process's id there.
            reason: The reason, for people; cut to LONGEST_NAME characters.
        """
        declined = Declined(host, pid, reason[:LONGEST_NAME])
        if declined not in self.declined:
            self.declined.append(declined)

    def learn_length(self, hello: Hello) -> None:
        """Take the run's length from the Hello of a worker that knows it, if it is not known yet."""
        self.length = self.length or hello.length

    def learn_steps(self, told: int | None) -> None:
        """Take the number of training steps that a worker reports; None changes nothing."""
        self.told_steps = self.told_steps if told is None else told

    @contextmanager
    def without_records(self, fault: str) -> Iterator[None]:
        """Answer queries with `fault`, the reason why the broker waits for its records."""
        self.fault = fault
        try:
            yield
        finally:
            self.fault = ""

    def learn_end(self, outcome: RunOutcome | None, steps: int | None) -> None:
        """Take the run's `outcome` and number of `steps` from what its folder records."""
        self.outcome, self.told_steps = outcome, steps

    def fail(self, reason: str, code: int) -> None:
        """End the run by a failure, unless it is over: later failures do not replace the first one."""
        if not self.lifecycle.over:
            self.end(RunEvent.FAILURE, RunOutcome(RunPhase.FAILED, reason, code))

    def end(self, event: RunEvent, outcome: RunOutcome) -> None:
        """Move the run by `event` to its end, store the outcome and stop all workers."""
        self.lifecycle.move(event)
        self.record_outcome(outcome)
        self.events.infos.append(f"run {self.id} has {outcome.phase}: {outcome.reason}")
        self.stop_workers(outcome)

    def record_outcome(self, outcome: RunOutcome) -> None:
        """Store `outcome` as the end of the run."""
        self.outcome = outcome
        self.store.put("outcome", msgspec.to_builtins(outcome))

    def stop_workers(self, outcome: RunOutcome) -> None:
        """Tell all workers, and those on standby, that the run has ended, with `outcome` as its end from now on."""
        self.outcome = outcome
        self.broadcast(outcome.stop_message)
        self.outgoing += [(contact.sender, outcome.stop_message) for contact in self.standby.values()]
