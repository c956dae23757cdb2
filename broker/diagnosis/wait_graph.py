"""Who waits for whom: from a worker that lacks a message to the one that should have put it, and on to the root.

stage 0 ──backward-0, message 940──> stage 1 ──backward-1, message 940──> stage 2, which computes 2B4 for 14 s
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from stageline.broker.control.protocol import Wait
from stageline.broker.ledger.ledger import Ledger, LedgerEntry, MicrobatchState, WorkPosition
from stageline.broker.membership.member import Member, MemberStatus
from stageline.broker.membership.replacements import Replacement
from stageline.pipeline.numbering import message_place
from stageline.pipeline.schedule import Schedule

QUIET = 1.0  # seconds after which a worker that reports ten times a second is silent
LATE = 1.0  # seconds that a message may be on its way, or two reports may be apart

_SENT = {
    "forward": frozenset({MicrobatchState.STASHED, MicrobatchState.BACKWARD, MicrobatchState.DONE}),
    "backward": frozenset({MicrobatchState.DONE}),
}


class RootCause(StrEnum):
    """What is at the root of a chain."""

    MISSING = "missing"  # nobody has the place
    STARTING = "starting"  # its worker has not begun
    SILENT = "silent"  # its worker is not heard
    STUCK = "stuck"  # its worker is heard, and completes no action
    COMPUTING = "computing"  # its worker gets on
    RESTING = "resting"  # its worker waits for no message
    ON_ITS_WAY = "on its way"  # the message was put, and has not arrived
    SERVER = "server"  # the server of the queues is away for the worker, or refuses messages
    SOURCE = "source"  # the message comes from outside the line of stages
    CIRCLE = "circle"  # they wait for each other
    BROKER = "broker"  # nobody is heard: the broker is cut off, rather than everyone else


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The run as the broker sees it at `now`, in seconds since the epoch. `members` and `gaps` by index."""

    schedule: Schedule
    members: Mapping[int, Member]
    gaps: Mapping[int, Replacement]
    ledger: Ledger
    now: float


@dataclass(frozen=True, slots=True)
class WaitEdge:
    """Worker `index` waits, for `seconds`, for a message that its `stage` needs: the edge of a chain.

    `flow` is "forward", "backward" or "target". `source` is the stage that puts it, None if it comes from outside.
    With `room` its `stage` has computed the message and waits for room to keep it, until `source` gets on.
    """

    index: int
    stage: int
    action: str
    queue: str
    flow: str
    step: int
    microbatch: int
    seconds: float
    source: int | None
    room: bool = False


@dataclass(frozen=True, slots=True)
class WaitChain:
    """Who waits for whom, and what the last of them waits for: `index` is the worker at the root, if there is one."""

    lacks: tuple[WaitEdge, ...]
    cause: RootCause
    index: int | None

    @property
    def last(self) -> WaitEdge | None:
        return self.lacks[-1] if self.lacks else None

    @property
    def harmless(self) -> bool:
        """Whether the run gets on."""
        just_sent = self.cause is RootCause.ON_ITS_WAY and self.lacks[-1].seconds < LATE
        just_closed = self.cause is RootCause.CIRCLE and min(lack.seconds for lack in self.lacks) < LATE
        return just_sent or just_closed or self.cause in (RootCause.COMPUTING, RootCause.RESTING)


def longest(scene: ClusterView) -> WaitChain:
    """The chain that says most: one with a root that holds up the run, the longest, the one that waits longest."""
    if _is_cut_off(scene):
        return WaitChain((), RootCause.BROKER, None)
    chains = [follow(scene, index) for index in range(len(scene.schedule.placement))]
    return max(chains, key=lambda chain: (not chain.harmless, len(chain.lacks), _waited(chain)))


def follow(scene: ClusterView, index: int) -> WaitChain:
    """The chain that begins with worker `index`."""
    lacks: list[WaitEdge] = []
    while (lack := _lack(scene, index)) is not None:
        if _troubled(scene, index):
            return WaitChain(tuple(lacks), RootCause.SERVER, index)
        lacks.append(lack)
        if lack.source is None:
            return WaitChain(tuple(lacks), RootCause.SOURCE, None)
        index = scene.schedule.owner(lack.source)
        if _is_on_its_way(scene, lack, index):
            return WaitChain(tuple(lacks), RootCause.SERVER if _troubled(scene, index) else RootCause.ON_ITS_WAY, index)
        if index in {each.index for each in lacks}:
            return WaitChain(tuple(lacks), RootCause.CIRCLE, index)
    return WaitChain(tuple(lacks), _cause(scene, index), index)


def unheard(scene: ClusterView, member: Member) -> bool:
    """Whether `member` is gone, or silent: what it said last need not be so any more."""
    return member.exited is not None or silence(scene, member) >= QUIET


def silence(scene: ClusterView, member: Member) -> float:
    """For how many seconds `member` was not heard."""
    return max(0.0, scene.now - member.heard)


def held(scene: ClusterView, lack: WaitEdge) -> LedgerEntry | None:
    """The microbatch that is lacked, if the stage that should give it has taken it and is at it."""
    if lack.source is None or lack.room:
        return None
    entry = scene.ledger.entry(WorkPosition(lack.source, lack.step, lack.microbatch))
    computing = MicrobatchState.FORWARD if lack.flow == "forward" else MicrobatchState.BACKWARD
    return entry if entry.state is computing else None


def _is_cut_off(scene: ClusterView) -> bool:
    reporting = [member for member in scene.members.values() if member.report is not None]
    return len(reporting) > 1 and all(silence(scene, member) >= QUIET for member in reporting)


def _waited(chain: WaitChain) -> float:
    return max((lack.seconds for lack in chain.lacks), default=0.0)


def _lack(scene: ClusterView, index: int) -> WaitEdge | None:
    """What worker `index` waits for, as far as it can be believed: not if it is not heard."""
    member = scene.members.get(index)
    if member is None or member.report is None or not member.report.waits or unheard(scene, member):
        return None
    wait = member.report.waits[0]
    flow, stage = _queue(wait, scene.schedule.stages)
    if stage is None:
        return None
    return _lack_of_room(scene, member, wait, flow, stage) if wait.room else _lack_of(scene, member, wait, flow, stage)


def _queue(wait: Wait, stages: int) -> tuple[str, int | None]:
    """Flow and consuming stage of the queue; None for a name that is no queue's of this run."""
    flow, _, stage = wait.queue.rpartition("-")
    known = flow in ("forward", "backward", "target") and stage.isascii() and stage.isdigit() and len(stage) < 9
    return flow, int(stage) if known and int(stage) < stages else None


def _lack_of(scene: ClusterView, member: Member, wait: Wait, flow: str, stage: int) -> WaitEdge:
    step, microbatch = message_place(wait.number, scene.ledger.microbatches)
    source = _producer(scene, flow, stage)
    seconds = max(0.0, scene.now - member.changed)
    return WaitEdge(member.index, stage, wait.action, wait.queue, flow, step, microbatch, seconds, source)


def _lack_of_room(scene: ClusterView, member: Member, wait: Wait, flow: str, stage: int) -> WaitEdge | None:
    """None for a queue that no stage of the run fills."""
    producer = _producer(scene, flow, stage)
    if producer is None:
        return None
    step, microbatch = message_place(wait.number, scene.ledger.microbatches)
    source, seconds = _furthest_behind(scene, stage), max(0.0, scene.now - member.changed)
    return WaitEdge(member.index, producer, wait.action, wait.queue, flow, step, microbatch, seconds, source, room=True)


def _furthest_behind(scene: ClusterView, consumer: int) -> int:
    """The stage that room has to wait for, since a message is kept until all stages are past its step.

    Of several that have finished as few steps, one that waits for nothing, or else the one that takes from the queue.
    """
    finished = scene.ledger.finished
    return min(
        (stage for stage, steps in enumerate(finished) if steps == min(finished)),
        key=lambda stage: (_says_it_waits(scene, scene.schedule.owner(stage)), stage != consumer),
    )


def _says_it_waits(scene: ClusterView, index: int) -> bool:
    member = scene.members.get(index)
    return member is not None and member.idle and not unheard(scene, member)


def _producer(scene: ClusterView, flow: str, stage: int) -> int | None:
    """The stage that puts into the queue; None if that comes from outside."""
    before = {"forward": stage - 1, "backward": stage + 1}.get(flow, -1)
    return before if 0 <= before < scene.schedule.stages else None


def _troubled(scene: ClusterView, index: int) -> bool:
    """Whether the server of the worker's queues is away for it, as far as it can be believed."""
    member = scene.members.get(index)
    return (
        member is not None and member.report is not None and bool(member.report.trouble) and not unheard(scene, member)
    )


def _is_on_its_way(scene: ClusterView, lack: WaitEdge, owner: int) -> bool:
    """Whether the producer is there and has put the message; what a dead one had put, it has to put again."""
    member = scene.members.get(owner)
    if lack.source is None or lack.room or member is None or unheard(scene, member):
        return False
    return scene.ledger.entry(WorkPosition(lack.source, lack.step, lack.microbatch)).state in _SENT[lack.flow]


def _cause(scene: ClusterView, index: int) -> RootCause:
    member = scene.members.get(index)
    if member is None:
        return RootCause.MISSING
    if member.exited is None and not member.introduced:  # it loads what it needs, and says nothing meanwhile
        return RootCause.STARTING
    if member.report is not None and unheard(scene, member):
        return RootCause.SILENT
    if member.report is None:
        return RootCause.STARTING
    if member.idle and _troubled(scene, index):
        return RootCause.SERVER
    if member.idle or member.standing is MemberStatus.FINISHED:
        return RootCause.RESTING
    return RootCause.STUCK if scene.now - member.progressed >= LATE else RootCause.COMPUTING
