"""Who waits for whom: from a worker that lacks a message to the one that should have put it, and on to the root.

stage 0 ──backward-0, message 940──> stage 1 ──backward-1, message 940──> stage 2, which computes 2B4 for 14 s
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pipeline.schedule import Schedule

from .control import Wait
from .ledger import Entry, Ledger, Place, State
from .member import Member, Standing
from .replacing import Gap

QUIET = 1.0  # seconds after which a worker that reports ten times a second is silent
LATE = 1.0  # seconds that a message may be on its way, or two reports may be apart

_SENT = {"forward": frozenset({State.STASHED, State.BACKWARD, State.DONE}), "backward": frozenset({State.DONE})}


class Cause(StrEnum):
    """What is at the root of a chain."""

    MISSING = "missing"  # nobody has the place
    STARTING = "starting"  # its worker has not begun
    SILENT = "silent"  # its worker is not heard
    STUCK = "stuck"  # its worker is heard, and completes no action
    COMPUTING = "computing"  # its worker gets on
    RESTING = "resting"  # its worker waits for no message
    ON_ITS_WAY = "on its way"  # the message was put, and has not arrived
    SOURCE = "source"  # the message comes from outside the line of stages
    CIRCLE = "circle"  # they wait for each other
    BROKER = "broker"  # nobody is heard: the broker is cut off, rather than everyone else


@dataclass(frozen=True, slots=True)
class Scene:
    """The run as the broker sees it at `now`, in seconds since the epoch. `members` and `gaps` by index."""

    schedule: Schedule
    members: Mapping[int, Member]
    gaps: Mapping[int, Gap]
    ledger: Ledger
    now: float


@dataclass(frozen=True, slots=True)
class Lack:
    """Worker `index` waits, for `seconds`, for a message that its `stage` needs: the edge of a chain.

    `flow` is "forward", "backward" or "target". `source` is the stage that puts it, None if it comes from outside.
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


@dataclass(frozen=True, slots=True)
class Chain:
    """Who waits for whom, and what the last of them waits for: `index` is the worker at the root, if there is one."""

    lacks: tuple[Lack, ...]
    cause: Cause
    index: int | None

    @property
    def last(self) -> Lack | None:
        return self.lacks[-1] if self.lacks else None

    @property
    def harmless(self) -> bool:
        """Whether the run gets on."""
        just_sent = self.cause is Cause.ON_ITS_WAY and self.lacks[-1].seconds < LATE
        just_closed = self.cause is Cause.CIRCLE and min(lack.seconds for lack in self.lacks) < LATE
        return just_sent or just_closed or self.cause in (Cause.COMPUTING, Cause.RESTING)


def longest(scene: Scene) -> Chain:
    """The chain that says most: one with a root that holds up the run, the longest, the one that waits longest."""
    if _is_cut_off(scene):
        return Chain((), Cause.BROKER, None)
    chains = [follow(scene, index) for index in range(len(scene.schedule.placement))]
    return max(chains, key=lambda chain: (not chain.harmless, len(chain.lacks), _waited(chain)))


def follow(scene: Scene, index: int) -> Chain:
    """The chain that begins with worker `index`."""
    lacks: list[Lack] = []
    while (lack := _lack(scene, index)) is not None:
        lacks.append(lack)
        if lack.source is None:
            return Chain(tuple(lacks), Cause.SOURCE, None)
        index = scene.schedule.owner(lack.source)
        if _is_on_its_way(scene, lack, index):
            return Chain(tuple(lacks), Cause.ON_ITS_WAY, index)
        if index in {each.index for each in lacks}:
            return Chain(tuple(lacks), Cause.CIRCLE, index)
    return Chain(tuple(lacks), _cause(scene, index), index)


def unheard(scene: Scene, member: Member) -> bool:
    """Whether `member` is gone, or silent: what it said last need not be so any more."""
    return member.exited is not None or silence(scene, member) >= QUIET


def silence(scene: Scene, member: Member) -> float:
    """For how many seconds `member` was not heard."""
    return max(0.0, scene.now - member.heard)


def held(scene: Scene, lack: Lack) -> Entry | None:
    """The microbatch that is lacked, if the stage that should give it has taken it and is at it."""
    if lack.source is None:
        return None
    entry = scene.ledger.entry(Place(lack.source, lack.step, lack.microbatch))
    computing = State.FORWARD if lack.flow == "forward" else State.BACKWARD
    return entry if entry.state is computing else None


def _is_cut_off(scene: Scene) -> bool:
    reporting = [member for member in scene.members.values() if member.report is not None]
    return len(reporting) > 1 and all(silence(scene, member) >= QUIET for member in reporting)


def _waited(chain: Chain) -> float:
    return max((lack.seconds for lack in chain.lacks), default=0.0)


def _lack(scene: Scene, index: int) -> Lack | None:
    """What worker `index` waits for, as far as it can be believed: not if it is not heard."""
    member = scene.members.get(index)
    if member is None or member.report is None or not member.report.waits or unheard(scene, member):
        return None
    wait = member.report.waits[0]
    flow, stage = _queue(wait, scene.schedule.stages)
    return None if stage is None else _lack_of(scene, member, wait, flow, stage)


def _queue(wait: Wait, stages: int) -> tuple[str, int | None]:
    """Flow and consuming stage of the queue; None for a name that is no queue's of this run."""
    flow, _, stage = wait.queue.rpartition("-")
    known = flow in ("forward", "backward", "target") and stage.isascii() and stage.isdigit() and len(stage) < 9
    return flow, int(stage) if known and int(stage) < stages else None


def _lack_of(scene: Scene, member: Member, wait: Wait, flow: str, stage: int) -> Lack:
    step, microbatch = divmod(wait.number, scene.ledger.microbatches)
    before = {"forward": stage - 1, "backward": stage + 1}.get(flow, -1)
    source = before if 0 <= before < scene.schedule.stages else None
    seconds = max(0.0, scene.now - member.changed)
    return Lack(member.index, stage, wait.action, wait.queue, flow, step, microbatch, seconds, source)


def _is_on_its_way(scene: Scene, lack: Lack, owner: int) -> bool:
    """Whether the producer is there and has put the message; what a dead one had put, it has to put again."""
    member = scene.members.get(owner)
    if lack.source is None or member is None or unheard(scene, member):
        return False
    return scene.ledger.entry(Place(lack.source, lack.step, lack.microbatch)).state in _SENT[lack.flow]


def _cause(scene: Scene, index: int) -> Cause:
    member = scene.members.get(index)
    if member is None:
        return Cause.MISSING
    if member.report is not None and unheard(scene, member):
        return Cause.SILENT
    if member.report is None:
        return Cause.STARTING
    if member.idle or member.standing is Standing.FINISHED:
        return Cause.RESTING
    return Cause.STUCK if scene.now - member.progressed >= LATE else Cause.COMPUTING
