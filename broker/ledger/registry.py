"""The places of the plan: which process has which, and under which incarnation.

    Hello ──> present ──> finished ──> left
                 └──────────┴────────> lost     by the rule of `losses.loss_of`

A scripted run has one place without stages, the last: that of the user's script, which calls the workers. Times are
seconds since the epoch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from stageline.broker.control.messages import Hello, Refused
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.schedule import Placement

from .member import Member
from .script import kind_of_member

# What a store keeps of a member.
_STORED = (
    "index", "incarnation", "name", "host", "pid", "endpoint", "introduced", "aware", "start", "generation", "former",
    "token", "promoted", "queues", "notes", "disk",
)  # fmt: skip

_TOLD = ("name", "host", "pid", "endpoint", "token", "queues", "notes", "disk")  # in its Hello
NEVER: Mapping[int, int] = MappingProxyType({})  # no place's worker was replaced
ProcessKey = tuple[str, str, int, str]


def may_take(claim: int | None, index: int, stages: Sequence[int]) -> bool:
    """Return True if a process may have a place. The script's place is only for a process that claims it.

    Args:
        claim: The index that the process claims; None for any worker's place.
        index: The place's index.
        stages: The place's stages; empty for the script's place.
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
    """Return the key that tells processes apart.

    Its token, which is shown to the broker alone, tells even a process apart that names itself as another.
    """
    return hello.name, hello.host, hello.pid, hello.token


@dataclass(slots=True)
class Registry:
    """A table of the plan's places, which gives out places and incarnations and finds the sender of a message."""

    placement: Placement
    labels: Sequence[tuple[str, ...]] = ()  # of each place's stages, where stages have replicas
    floor: int = 0  # incarnations given out from now on are above it
    incarnation: int = 0  # the highest given out
    members: dict[int, Member] = field(default_factory=dict)  # by index
    begun: bool = False  # every worker of the plan was present at the same time once
    recorded: int = 0  # the highest incarnation in the records that were restored
    since: int = 0  # no worker of this incarnation or an older one still runs: the run was restarted as a whole
    generation: int = 0  # of the places' keys
    rekeyed: float = 0.0  # when the present generation began because a machine must not take part any more
    party_keys: dict[int, str] = field(default_factory=dict)  # by index: the key that the place's last process has
    announced: tuple[int, dict[int, tuple[int, str]]] = (0, {})  # generation, peers, as all workers were told last

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
        """Return the workers with stages that messages are sent to, by index; the script is not among them."""
        return [member for member in self._workers() if member.reachable]

    def announces(self) -> bool:
        """Return True if the peers, or their keys, have changed since the last call."""
        before, self.announced = self.announced, (self.generation, self.peers)
        return self.announced != before

    def begin_generation(self, now: float) -> None:
        """Give all places other keys from `now` on."""
        self.generation += 1
        self.rekeyed = now

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
        """Start over after lost records, with the workers `kept`, which keep their state.

        Args:
            kept: The workers' contacts, by index.
            step: The checkpoint that the run is at.
            floor: New incarnations are above this one.
            now: Seconds since the epoch.
            replaced: How often each place's worker was replaced, by index.
        """
        self.members.clear()
        self.recorded = self.floor = floor
        for index, contact in sorted(kept.items()):
            known = {"former": contact.hello.incarnation, "generation": 1 + replaced.get(index, 0)}
            self._place(index, contact, now, step, introduced=True, **known)
            if contact.hello.key:
                self.party_keys[index] = contact.hello.key
        self.since = self.since if kept else floor
        self.generation = floor  # above those of the lost records, and the keys themselves are others
        self.begun = True

    def free(self, member: Member) -> None:
        """Take the place away from `member`, so that another process can have it."""
        self.members.pop(member.index, None)

    def free_all(self) -> None:
        """Take all places away; incarnations keep growing."""
        self.members.clear()
        self.since = max(self.incarnation, self.floor)
        self.begun = False

    def facts(self) -> dict[str, object]:
        """Return what is stored for `restore`, as JSON's own types."""
        kept = [{name: getattr(member, name) for name in _STORED} for member in self._in_order()]
        counts = {"incarnation": self.incarnation, "since": self.since}
        used = {str(index): key for index, key in self.party_keys.items()}
        keys = {"generation": self.generation, "rekeyed": self.rekeyed, "party_keys": used}
        return {**counts, **keys, "begun": self.begun, "members": kept}

    def restore(self, facts: Mapping[str, object], now: float) -> None:
        """Take over a former broker's workers under their incarnations; each has a lease from `now` on to reconnect."""
        self.recorded = self.incarnation = msgspec.convert(facts["incarnation"], int)
        self.since = msgspec.convert(facts.get("since", 0), int)
        self.generation = msgspec.convert(facts.get("generation", 0), int)
        self.rekeyed = msgspec.convert(facts.get("rekeyed", 0.0), float)
        used = msgspec.convert(facts.get("party_keys", {}), dict[str, str])
        self.party_keys = {int(index): key for index, key in used.items()}
        self.begun = msgspec.convert(facts["begun"], bool)
        for kept in msgspec.convert(facts["members"], list[dict[str, Any]]):
            index = kept["index"]
            place = {"stages": self.placement[index], "labels": self._labels(index)}
            known = {**kept, **place, "last_seen": now, "last_progress": now}
            self.members[index] = msgspec.convert(known, kind_of_member(self.placement[index]))

    def _labels(self, index: int) -> tuple[str, ...]:
        return self.labels[index] if self.labels else ()

    def _in_order(self) -> Iterator[Member]:
        return (self.members[index] for index in sorted(self.members))

    def _workers(self) -> Iterator[Member]:
        return (member for member in self._in_order() if member.stages)

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
        return (
            hello.claim
            if owner is None
            else Refused(owner.occupies(now, others_free=bool(self.missing)), code=ExitCode.FAILED)
        )

    def _place(self, index: int, contact: Contact, now: float, start: int, **known: Any) -> Member:
        self.incarnation = max(self.incarnation, self.floor) + 1
        hello = contact.hello
        self.members[index] = kind_of_member(self.placement[index])(
            index=index,
            incarnation=self.incarnation,
            **{
                name: getattr(hello, name)
                for name in ("name", "host", "pid", "endpoint", "token", "queues", "notes", "disk")
            },
            last_seen=now,
            start=start,
            sender=contact.sender,
            last_progress=now,
            stages=self.placement[index],
            labels=self._labels(index),
            **known,
        )
        return self.members[index]
