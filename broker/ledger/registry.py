"""The places of the plan: which process has which, and under which incarnation.

    Hello ──> present ──> finished ──> left
                 └──────────┴────────> lost     by the rule of `losses.loss_of`

A scripted run has one place without stages, the last: that of the user's script, which calls the workers. Times are
seconds since the epoch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import msgspec

from stageline.broker.control.messages import Exited, Failed, Finished, Goodbye, Hello, Refused, Report
from stageline.pipeline.digest import TensorDigest
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.program import Queue
from stageline.pipeline.schedule import Placement

SCRIPT = "the script"

# What a store keeps of a member.
_STORED = (
    "index", "incarnation", "name", "host", "pid", "endpoint", "introduced", "aware", "start", "generation", "former",
    "token", "promoted", "queues",
)  # fmt: skip

NEVER: Mapping[int, int] = MappingProxyType({})  # no place's worker was replaced
ProcessKey = tuple[str, str, int, str]


class MemberStatus(StrEnum):
    """Part that a worker takes in the run."""

    PRESENT = "present"
    FINISHED = "finished"
    LEFT = "left"
    LOST = "lost"


@dataclass(slots=True)
class Member:
    """A worker with a place in the plan, or the script. Its methods note what it has said, and what became of it."""

    index: int
    stages: tuple[int, ...]
    incarnation: int
    name: str
    host: str
    pid: int
    endpoint: str
    last_seen: float
    start: int = 0  # the step it began at
    generation: int = 1  # counts the workers that have had this place, from 1
    former: int = 0  # the incarnation it had before the broker's records were lost
    token: str = ""  # of its first Hello: by it the process is known before it has used its incarnation
    sender: bytes = b""  # its address on the channel; empty until it contacts this broker
    introduced: bool = False  # its endpoint is known, even if it has none
    aware: bool = False  # it has sent a message under its incarnation
    counted: set[int] = field(default_factory=set)  # stages of which this broker knows how many steps it has finished
    promoted: bool = False  # it was on standby when the place became free
    superseded: bool = False  # another process of its host asks for its place: it may have been started in its stead
    status: MemberStatus = MemberStatus.PRESENT
    report: Report | None = None  # the newest
    last_progress: float = 0.0  # when it last completed an action, or had none to compute
    activity_since: float = 0.0  # when its present activity was first reported
    digests: Mapping[str, TensorDigest] | None = None  # of its stages' weights, once it has finished
    copies: Mapping[str, str] = field(default_factory=dict)  # names there of what stages share, with that in the first
    exited: tuple[float, Exited] | None = None  # when its process ended, and how
    parting: tuple[float, Failed | Goodbye] | None = None  # when it said that it ends, and how; nothing since
    labels: tuple[str, ...] = ()  # its stages for people, where stages have replicas: "1.0", "1.1"
    queues: tuple[Queue, ...] = ()  # that it has an end of, as it has told

    @property
    def is_script(self) -> bool:
        """True for the script: it has no stages."""
        return not self.stages

    @property
    def title(self) -> str:
        """ "worker 1", "the script"."""
        return SCRIPT if self.is_script else f"worker {self.index}"

    @property
    def label(self) -> str:
        """ "worker 1 (stages 0 and 2)", "the script"."""
        return worker_label(self.index, self.labels or self.stages)

    @property
    def titles(self) -> str:
        """ "stages 0 and 2", "stage 1.0"."""
        return stages_label(self.labels or self.stages)

    @property
    def process(self) -> str:
        """ "worker-1 (pid 101, host a)"."""
        return f"{self.name} (pid {self.pid}, host {self.host})"

    @property
    def reachable(self) -> bool:
        """True while messages are still sent to it."""
        return self.status in (MemberStatus.PRESENT, MemberStatus.FINISHED)

    @property
    def resumes(self) -> str:
        """What a successor of a lost member does, once its report shows that it is at work; "" before."""
        working = "computes again" if self.report is not None and self.report.actions else ""
        return "is there again" if self.is_script else working

    def queue(self, name: str) -> Queue | None:
        """Return its queue of that `name`; None if it has no end of one."""
        return next((queue for queue in self.queues if queue.name == name), None)

    def note_contact(self, sender: bytes, now: float) -> None:
        """Note a message under the member's incarnation, from the address `sender`."""
        self.sender, self.last_seen, self.aware = sender, now, True
        self.superseded = False

    def note_report(self, report: Report, now: float) -> None:
        """Note the newest report, and whether the member makes progress."""
        before, self.report = self.report, report
        if before is None or before.actions != report.actions or report.waiting:
            self.last_progress = now
        if before is None or before.now != report.now:
            self.activity_since = now

    def reconnect(self, hello: Hello, sender: bytes, now: float) -> None:
        """Note another Hello of the member, which may bring its endpoint."""
        self.sender, self.endpoint, self.last_seen = sender, hello.endpoint, now
        self.queues = hello.queues or self.queues
        self.aware = self.aware or hello.incarnation == self.incarnation
        if not self.introduced and (self.aware or hello.endpoint):
            self.introduced, self.last_progress = True, now  # from here on it is expected to make progress

    def move(self, sender: bytes) -> None:
        """Answer to another address from now on."""
        self.sender = sender

    def contest(self) -> None:
        """Note that another process of its host asks for its place, unless this broker has heard the member.

        Then it keeps its lease: a name and a host prove nothing, and a paused process is silent too.
        """
        self.superseded = not self.sender

    def restart_lease(self, now: float) -> None:
        """Start the lease over: the broker itself was away."""
        self.last_seen = self.last_progress = now

    def part(self, message: Failed | Goodbye, now: float) -> None:
        """Note that the member says that it ends. The first such message counts."""
        self.parting = self.parting or (now, message)

    def take_parting(self) -> Failed | Goodbye | None:
        """Return the message by which it has said that it ends, and forget that. Returns None if it has not."""
        said, self.parting = self.parting, None
        return None if said is None else said[1]

    def note_exit(self, exited: Exited, now: float) -> None:
        """Note the end of the member's process."""
        self.exited = now, exited

    def finish(self, finished: Finished) -> None:
        """Note that the member has done all steps."""
        self.status = MemberStatus.FINISHED
        self.digests, self.copies = finished.digests, finished.copies

    def leave(self) -> None:
        """Note that the member takes no part in the run any more, as it said or was told."""
        self.status = MemberStatus.LEFT

    def lose(self) -> None:
        """Note that the member is lost."""
        self.status = MemberStatus.LOST

    def recall_finished(self) -> None:
        """Note that a worker has said to a former broker that it has finished. A script does not say so; it leaves."""
        self.status = self.status if self.is_script else MemberStatus.FINISHED


def worker_label(index: int, stages: Sequence[int | str]) -> str:
    """ "worker 1 (stages 0 and 2)"; "the script" for the place without stages."""
    return f"worker {index} ({stages_label(stages)})" if stages else SCRIPT


def stages_label(stages: Sequence[int | str]) -> str:
    """ "stage 1", "stages 0 and 2", "stages 0, 2 and 4"."""
    *others, last = map(str, stages)
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"


def may_take(claim: int | None, index: int, stages: Sequence[int]) -> bool:
    """Return True if a process with this `claim` (None: any worker's place) may have place `index`, of `stages`.

    The script's place is only for one that claims it.
    """
    return claim == index or (claim is None and bool(stages))


@dataclass(frozen=True, slots=True)
class Contact:
    """A process without a place: its newest Hello, its address, when it was last seen, and when it came."""

    hello: Hello
    sender: bytes
    last_seen: float
    came: float = 0.0


def process_key(hello: Hello) -> ProcessKey:
    """Return what tells processes apart; by the token, which no one is shown, also one that names itself as another."""
    return hello.name, hello.host, hello.pid, hello.token


@dataclass(slots=True)
class Registry:
    """Gives places and incarnations, and finds the member that a message is from."""

    placement: Placement
    labels: Sequence[tuple[str, ...]] = ()  # of each place's stages, where stages have replicas
    floor: int = 0  # incarnations given out from now on are above it
    incarnation: int = 0  # the highest given out
    members: dict[int, Member] = field(default_factory=dict)  # by index
    begun: bool = False  # every worker of the plan was present at the same time once
    recorded: int = 0  # the highest incarnation in the records that were restored
    since: int = 0  # no worker of this incarnation or an older one still runs: the run was restarted as a whole
    announced: dict[int, tuple[int, str]] = field(default_factory=dict)  # the peers that all workers were sent last

    @property
    def missing(self) -> list[int]:
        """The indexes of empty places."""
        return [index for index in range(len(self.placement)) if index not in self.members]

    @property
    def peers(self) -> dict[int, tuple[int, str]]:
        """The addresses of introduced workers' queues: index -> (incarnation, endpoint)."""
        return {each.index: (each.incarnation, each.endpoint) for each in self._in_order() if each.introduced}

    @property
    def complete(self) -> bool:
        """True if every worker of the plan is present and introduced."""
        return len(self.peers) == len(self.placement)

    def reachable(self) -> list[Member]:
        """Return the workers that messages are sent to, by index."""
        return [member for member in self._in_order() if member.reachable]

    def reachable_workers(self) -> list[Member]:
        """Return those of them that have stages, without the script."""
        return [member for member in self._workers() if member.reachable]

    def announces(self) -> bool:
        """Return True if the peers are others than at the last call."""
        before, self.announced = self.announced, self.peers
        return self.announced != before

    def register(
        self,
        hello: Hello,
        sender: bytes,
        now: float,
        start: int = 0,
        replaced: Mapping[int, int] = NEVER,
        *,
        promoted: bool = False,
    ) -> Member | Refused:
        """Give the sender of `hello` a place, or confirm the one it has. Refusals say what would work.

        Args:
            hello: A process's request for a place.
            sender: Address of the process on the channel.
            now: Seconds since the epoch.
            start: Step at which the stages of a place that is given now begin.
            replaced: How often each place's worker was replaced, by index.
            promoted: True if the process was on standby when the place became free.
        """
        member = self._known(hello)
        if member is not None:
            member.reconnect(hello, sender, now)
        elif hello.incarnation:
            return Refused(
                f"incarnation {hello.incarnation} of {hello.name} is not current: its stages were given to another "
                "process, or its run is over. Start the worker again",
                code=ExitCode.FAILED,
            )
        else:
            index = self._free_index(hello, now)
            if isinstance(index, Refused):
                return index
            known = {"generation": 1 + replaced.get(index, 0), "introduced": bool(hello.endpoint), "promoted": promoted}
            member = self._place(index, Contact(hello, sender, now), now, start, **known)
            member.counted.update(member.stages)
        self.begun = self.begun or self.complete
        return member

    def current(self, incarnation: int) -> Member | None:
        """Return the worker that holds `incarnation`; None for a stale one."""
        return next((member for member in self.members.values() if member.incarnation == incarnation), None)

    def renewed(self, incarnation: int) -> Member | None:
        """Return the worker that held `incarnation` before the records were lost, and was given a new one since."""
        return next((member for member in self.members.values() if member.former == incarnation > 0), None)

    def is_unknown(self, incarnation: int) -> bool:
        """Return True if `incarnation` was given out after these records were written: they are lost or stale.

        If there were no records, and every place was taken by a worker that contacted this broker, then the run has
        started over, and another incarnation is a stale one. Restored records cannot prove an incarnation current: the
        worker they name may be stale.
        """
        confirmed = not self.recorded and not self.missing and all(each.sender for each in self.members.values())
        between = self.recorded < incarnation <= self.floor
        return not confirmed and (between or incarnation > max(self.incarnation, self.floor))

    def reset(
        self, kept: Mapping[int, Contact], step: int, floor: int, now: float, replaced: Mapping[int, int] = NEVER
    ) -> None:
        """Start over above incarnation `floor`, with the workers `kept`, which keep their state of `step`."""
        self.members.clear()
        self.recorded = self.floor = floor
        for index, contact in sorted(kept.items()):
            known = {"former": contact.hello.incarnation, "generation": 1 + replaced.get(index, 0)}
            self._place(index, contact, now, step, introduced=True, **known)
        self.since = self.since if kept else floor
        self.begun = True

    def free(self, member: Member) -> None:
        """Take the worker's place away, so that another can have it."""
        self.members.pop(member.index, None)

    def free_all(self) -> None:
        """Take all places away; incarnations keep growing."""
        self.members.clear()
        self.since = max(self.incarnation, self.floor)
        self.begun = False

    def facts(self) -> dict[str, object]:
        """Return what is stored for `restore`, as JSON's own types."""
        kept = [{name: getattr(member, name) for name in _STORED} for member in self._in_order()]
        return {"incarnation": self.incarnation, "since": self.since, "begun": self.begun, "members": kept}

    def restore(self, facts: Mapping[str, object], now: float) -> None:
        """Take over a former broker's workers under their incarnations; each has a lease to reconnect."""
        self.recorded = self.incarnation = msgspec.convert(facts["incarnation"], int)
        self.since = msgspec.convert(facts.get("since", 0), int)
        self.begun = msgspec.convert(facts["begun"], bool)
        for kept in msgspec.convert(facts["members"], list[dict[str, Any]]):
            index = kept["index"]
            place = {"stages": self.placement[index], "labels": self._labels(index)}
            self.members[index] = msgspec.convert({**kept, **place, "last_seen": now, "last_progress": now}, Member)

    def _labels(self, index: int) -> tuple[str, ...]:
        return self.labels[index] if self.labels else ()

    def _in_order(self) -> Iterator[Member]:
        return (self.members[index] for index in sorted(self.members))

    def _workers(self) -> Iterator[Member]:
        return (member for member in self._in_order() if not member.is_script)

    def _known(self, hello: Hello) -> Member | None:
        """Return the member that sends Hello again: it names its incarnation, or its assignment has not reached it.

        A process that has used its incarnation and does not name it has restarted: in a container it may well have the
        same host name and process number.
        """
        if hello.incarnation:
            return self.current(hello.incarnation) or self.renewed(hello.incarnation)
        unaware = (member for member in self.members.values() if not member.aware)
        key = process_key(hello)
        return next((each for each in unaware if (each.name, each.host, each.pid, each.token) == key), None)

    def _free_index(self, hello: Hello, now: float) -> int | Refused:
        if hello.claim is None:
            # In a resumed run, a place to begin at with snapshots that it has verified; else any.
            read = set(hello.inspection.stages) if hello.inspection is not None else set()
            free = [index for index in self.missing if may_take(None, index, self.placement[index])]
            fit = [index for index in free if read.issuperset(self.placement[index])]
            workers = [f"{each.index} is {each.process}" for each in self._workers()]
            full = f"all {len(workers)} workers of the plan have joined: {', '.join(workers)}. Stop one of them first"
            return next(iter(fit or free), Refused(full, code=ExitCode.FAILED))
        if hello.claim >= len(self.placement):
            last = sum(map(bool, self.placement)) - 1
            return Refused(f"there is no worker {hello.claim}: the plan has workers 0 to {last}", code=ExitCode.USAGE)
        owner = self.members.get(hello.claim)
        return hello.claim if owner is None else Refused(self._claimed(owner, now), code=ExitCode.FAILED)

    def _claimed(self, owner: Member, now: float) -> str:
        ago = f"{max(0.0, now - owner.last_seen):.1f} s ago"
        if owner.is_script:
            return f"the run has its script: {owner.process}, alive {ago}; stop it first, or wait until it is lost"
        if not owner.sender:
            return (
                f"{owner.titles} belonged to worker {owner.process} before the broker restarted; "
                "it may still be running"
            )
        verb = "is" if len(owner.stages) == 1 else "are"
        way_out = "start this one without --index or stop the other" if self.missing else "stop the other first"
        return f"{owner.titles} {verb} claimed by worker {owner.process}, alive {ago}; {way_out}"

    def _place(self, index: int, contact: Contact, now: float, start: int, **known: Any) -> Member:
        self.incarnation = max(self.incarnation, self.floor) + 1
        hello = contact.hello
        self.members[index] = Member(
            index=index,
            incarnation=self.incarnation,
            **{name: getattr(hello, name) for name in ("name", "host", "pid", "endpoint", "token", "queues")},
            last_seen=now,
            start=start,
            sender=contact.sender,
            last_progress=now,
            stages=self.placement[index],
            labels=self._labels(index),
            **known,
        )
        return self.members[index]
