"""The chain of waiting workers: from one that lacks a message to the one that has to put it, and on to the root.

stage 0 ──backward-0, message 940──> stage 1 ──backward-1, message 940──> stage 2, which computes 2B4 for 14 s
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from stageline.broker.control.messages import Report
from stageline.broker.control.records import Lack
from stageline.broker.ledger.ledger import Ledger, MicrobatchPosition, MicrobatchState
from stageline.broker.ledger.losses import Leases, Replacement
from stageline.broker.ledger.member import Member, MemberStatus
from stageline.pipeline.program import Per
from stageline.pipeline.schedule import Placement, Schedule

QUIET = 1.0  # seconds without a report after which a worker counts as silent; it reports ten times a second
LATE = 1.0  # seconds that a message may take to arrive, or that two reports may be apart

_UNFORWARDED = {MicrobatchState.QUEUED, MicrobatchState.FORWARD}
# State of a microbatch at the stage that puts a message of it, by the queue's flow: while the stage computes the
# message, and once it has put it. Other queues have their message once the microbatch is done.
_COMPUTING = {
    "forward": {MicrobatchState.FORWARD},
    "backward": {MicrobatchState.BACKWARD, MicrobatchState.INPUT},
    "tied": {MicrobatchState.BACKWARD, MicrobatchState.WEIGHT},
}
_SENT = {
    "forward": frozenset(MicrobatchState) - _UNFORWARDED,
    "backward": frozenset({MicrobatchState.HALFWAY, MicrobatchState.WEIGHT, MicrobatchState.DONE}),
}
_DONE = frozenset({MicrobatchState.DONE})


class RootCause(StrEnum):
    """A reason why the worker at the root of a chain does not deliver."""

    MISSING = "missing"  # the place is empty
    STARTING = "starting"  # its worker has not sent a report
    SILENT = "silent"  # no report arrives from its worker
    STUCK = "stuck"  # its worker reports, and completes no action
    COMPUTING = "computing"  # its worker makes progress
    RESTING = "resting"  # its worker waits for no message
    ON_ITS_WAY = "on its way"  # the message was put, and has not arrived
    SERVER = "server"  # its worker cannot reach the server of the queues, or is refused
    RESOURCE = "resource"  # its worker waits for disk space, descriptors or memory
    SCRIPT = "script"  # the script makes no call: its own code runs, without a limit of time
    CIRCLE = "circle"  # the workers wait for each other
    PAUSED = "paused"  # a person has paused the run, and each worker has come to the step of the pause
    BROKER = "broker"  # no report arrives at all: the broker is cut off, not the workers


HARMLESS = frozenset(  # the run makes progress, or is to make none
    {RootCause.COMPUTING, RootCause.RESTING, RootCause.SCRIPT, RootCause.PAUSED}
)


@dataclass(frozen=True, slots=True)
class Vacancy:
    """A way to fill an empty place, for people.

    Attributes:
        first: How a process takes the place at first.
        again: How a process takes it after a loss.
        patience: Seconds for which the place may be empty.
        ends: The run's end after that, continuing a sentence about the run.
        replaced: True if a lost process is replaced without help.
    """

    first: str
    again: str
    patience: float
    ends: str
    replaced: bool


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The broker's knowledge of the workers at `now` (seconds since the epoch).

    Attributes:
        placement: The stages of each place; none for a script's place.
        members: The workers, by index.
        replacements: The pending replacements, by index.
        leases: The limits after which a worker is lost.
        places: The way to fill each place.
    """

    schedule: Schedule
    placement: Placement
    members: Mapping[int, Member]
    replacements: Mapping[int, Replacement]
    ledger: Ledger
    now: float
    leases: Leases
    places: Sequence[Vacancy]


@dataclass(frozen=True, slots=True)
class WaitEdge:
    """A wait of worker `index`, for `seconds`, for a message that its `stage` needs from worker `on`.

    Attributes:
        stage: The waiting stage; None for calls, losses and replies, which are of no stage.
        flow: The queue's flow; `per` is the queue's too.
        step: The step; for calls, losses and replies, the call's number; in an evaluation, the evaluated batch's; for a
            verdict, the round's.
        source: The stage that puts the message; None where `stage` is.
        number: The message's number in its queue.
        room: True if `stage` waits for room or credit to put the message, until `source` makes progress.
    """

    index: int
    stage: int | None
    action: str
    queue: str
    flow: str
    per: Per
    step: int
    microbatch: int
    seconds: float
    source: int | None
    on: int
    number: int
    room: bool = False


@dataclass(frozen=True, slots=True)
class WaitChain:
    """A path of edges from worker to worker, with its cause and the index of the worker at its root, if any."""

    edges: tuple[WaitEdge, ...]
    cause: RootCause
    index: int | None

    @property
    def harmless(self) -> bool:
        """True if the run makes progress despite the waits."""
        just_sent = self.cause is RootCause.ON_ITS_WAY and self.edges[-1].seconds < LATE
        just_closed = self.cause is RootCause.CIRCLE and min(edge.seconds for edge in self.edges) < LATE
        return just_sent or just_closed or self.cause in HARMLESS


def longest_chain(cluster: ClusterState) -> WaitChain:
    """Return the most informative chain: one whose root blocks the run, then the longest, then the oldest."""
    silences = [silence(cluster, member) for member in cluster.members.values() if member.report is not None]
    if len(silences) > 1 and min(silences) >= QUIET:
        return WaitChain((), RootCause.BROKER, None)
    chains = [follow(cluster, index) for index in range(len(cluster.placement))]
    return max(chains, key=lambda chain: (not chain.harmless, len(chain.edges), _waited(chain)))


def follow(cluster: ClusterState, index: int) -> WaitChain:
    """Return the chain that starts at worker `index`."""
    edges: list[WaitEdge] = []
    while (edge := _edge_from(cluster, index)) is not None:
        if _has_trouble(cluster, index):
            return WaitChain(tuple(edges), RootCause.SERVER, index)
        edges.append(edge)
        index = edge.on
        if _is_on_its_way(cluster, edge, index):
            return WaitChain(
                tuple(edges), RootCause.SERVER if _has_trouble(cluster, index) else RootCause.ON_ITS_WAY, index
            )
        if index in {each.index for each in edges}:
            return WaitChain(tuple(edges), RootCause.CIRCLE, index)
    return WaitChain(tuple(edges), _cause(cluster, index), index)


def is_silent(cluster: ClusterState, member: Member) -> bool:
    """Return True if `member` has exited or is silent, so that its last report may be out of date."""
    return member.exited is not None or silence(cluster, member) >= QUIET


def faults(cluster: ClusterState) -> list[tuple[int, str]]:
    """Return the index and fault of each worker that cannot do something now; the text continues "worker 1"."""
    reports = ((index, _trusted_report(cluster, index)) for index in sorted(cluster.members))
    return [(index, report.fault) for index, report in reports if report is not None and report.fault]


def silence(cluster: ClusterState, member: Member) -> float:
    """Return the seconds since the last message from `member`."""
    return max(0.0, cluster.now - member.last_seen)


def is_computed(cluster: ClusterState, edge: WaitEdge) -> bool:
    """Return True if the stage that should deliver the awaited microbatch is computing it."""
    return _state_at_source(cluster, edge) in _COMPUTING.get(edge.flow, ())


def _waited(chain: WaitChain) -> float:
    return max((edge.seconds for edge in chain.edges), default=0.0)


def _edge_from(cluster: ClusterState, index: int) -> WaitEdge | None:
    """Return the wait of worker `index`, or None.

    The result is None if the worker waits for nothing, or is silent, so that its report cannot be trusted.
    """
    member, report = cluster.members.get(index), _trusted_report(cluster, index)
    if member is None or report is None or not report.waits:
        return None
    wait = report.waits[0]
    queue = member.queue(wait.queue)
    if queue is None:
        return None
    step, microbatch = queue.at(wait.number) if queue.per.many else (wait.step, 0)
    stage, source, on = queue.target, queue.source, queue.producer
    if wait.lacks is Lack.CREDIT:
        stage, source, on = queue.source, queue.target, queue.consumer
    elif wait.lacks is Lack.ROOM:
        stage, source = queue.source, _furthest_behind(cluster, queue.target)
        on = cluster.schedule.owner(source)
    return WaitEdge(
        index,
        stage,
        wait.action,
        queue.name,
        queue.flow,
        queue.per,
        step,
        microbatch,
        max(0.0, cluster.now - member.activity_since),
        source,
        on,
        wait.number,
        room=wait.lacks is not Lack.MESSAGE,
    )


def _furthest_behind(cluster: ClusterState, consumer: int | None) -> int:
    """Return the stage that frees the room: a message is retained until all stages are past its step.

    Of several that are equally far behind, the result is one that waits for nothing, or else the queue's consumer.
    """
    finished = cluster.ledger.finished
    return min(
        (stage for stage, steps in enumerate(finished) if steps == min(finished)),
        key=lambda stage: (_reports_waiting(cluster, cluster.schedule.owner(stage)), stage != consumer),
    )


def _reports_waiting(cluster: ClusterState, index: int) -> bool:
    report = _trusted_report(cluster, index)
    return report is not None and report.waiting


def _has_trouble(cluster: ClusterState, index: int) -> bool:
    """Return True if the worker reports that the server of its queues is away or refuses messages."""
    report = _trusted_report(cluster, index)
    return report is not None and bool(report.trouble)


def _trusted_report(cluster: ClusterState, index: int) -> Report | None:
    """Return the worker's newest report; None if there is none, or if the worker is silent."""
    member = cluster.members.get(index)
    return None if member is None or is_silent(cluster, member) else member.report


def _is_on_its_way(cluster: ClusterState, edge: WaitEdge, owner: int) -> bool:
    """Return True if the producer has put the message.

    A producer that is gone does not count: its successor puts the message again.
    """
    member = cluster.members.get(owner)
    if member is None or member.report is None or edge.room or is_silent(cluster, member):
        return False
    lacking = _edge_from(cluster, owner)
    match edge.per:
        case Per.CALL:  # the caller's actions: the number of its next call
            return member.report.actions > edge.step
        case Per.REPLY:  # the next call is taken once the reply was put
            return lacking is not None and lacking.per is Per.CALL and lacking.step > edge.step
        case Per.MICROBATCH:
            return _state_at_source(cluster, edge) in _SENT.get(edge.flow, _DONE)
        case Per.STEP if edge.source is not None:  # put at the end of the step there, or before what is exchanged
            return cluster.ledger.finished[edge.source] > edge.step or _has_exchanged(cluster, edge, lacking)
        case Per.STEP:  # put once the last stage has finished the step and has written what snapshot is due
            rests = member.report.waiting and lacking is None  # until that is written
            has_room = lacking is None or lacking.queue != edge.queue
            return cluster.ledger.finished[-1] > edge.number and has_room and not rests
        case _:
            return False


def _has_exchanged(cluster: ClusterState, edge: WaitEdge, lacking: WaitEdge | None) -> bool:
    """Return True if two stages exchange such messages in each step, and the producer waits for the other's.

    Each puts all its own messages before it takes any, so the message has been put.
    """
    if lacking is None or lacking.room:
        return False
    own = cluster.members[edge.index].queues
    answers = any((each.flow, each.source, each.target) == (edge.flow, edge.stage, edge.source) for each in own)
    return answers and (lacking.flow, lacking.stage, lacking.step) == (edge.flow, edge.source, edge.step)


def _state_at_source(cluster: ClusterState, edge: WaitEdge) -> MicrobatchState | None:
    """Return the state of the awaited microbatch at the stage that should deliver it; None if no stage should."""
    if edge.source is None or edge.room or edge.per is not Per.MICROBATCH:
        return None
    return cluster.ledger.entry(MicrobatchPosition(edge.source, edge.step, edge.microbatch)).state


def _cause(cluster: ClusterState, index: int) -> RootCause:
    match cluster.members.get(index):
        case None:
            return RootCause.MISSING
        case Member(report=None) | Member(exited=None, introduced=False):  # without an endpoint: it loads its model
            return RootCause.STARTING
        case member if is_silent(cluster, member):
            return RootCause.SILENT
        case Member(report=Report(waiting=True)) if _has_trouble(cluster, index):
            return RootCause.SERVER
        case Member(report=Report(waiting=True, fault=str(fault))) if fault:
            return RootCause.RESOURCE
        case Member(report=Report(waiting=True)) | Member(status=MemberStatus.FINISHED):
            return RootCause.RESTING
        case Member(stages=()):
            return RootCause.SCRIPT
        case member:
            return RootCause.STUCK if cluster.now - member.last_progress >= LATE else RootCause.COMPUTING
