"""Who is which worker of the plan, under which incarnation, and who is lost.

    hello ──> present ──> finished ──> left
                 └──────────┴────────> lost     not heard for a lease, no progress for a lease, or its process exited

It has no clock: whoever asks says what time it is, in seconds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from stageline.broker.control.protocol import Hello, Refused, Report
from stageline.broker.recovery.reconcile import Contact
from stageline.pipeline.exit_code import ExitCode
from stageline.pipeline.schedule import Placement

from .failure_detector import WorkerLoss, loss_of
from .member import Member, stages_in_words


@dataclass(slots=True)
class Registry:
    """Gives places and incarnations, hears heartbeats, finds who is lost."""

    placement: Placement
    lease: float  # seconds
    incarnation: int = 0  # the highest handed out
    members: dict[int, Member] = field(default_factory=dict)  # by index
    begun: bool = False  # every worker of the plan was there at some moment
    recorded: int = 0  # the highest incarnation of the records that were found at the beginning
    floor: int = 0  # all incarnations that are handed out from now on are above it
    since: int = 0  # no worker of this incarnation or an older one is at work: all have begun again

    @property
    def missing(self) -> list[int]:
        """The indexes that nobody has."""
        return [index for index in range(len(self.placement)) if index not in self.members]

    @property
    def peers(self) -> dict[int, tuple[int, str]]:
        """Where the queues of those who have said so are: index -> (incarnation, endpoint)."""
        return {each.index: (each.incarnation, each.endpoint) for each in self._in_order() if each.introduced}

    @property
    def complete(self) -> bool:
        """Whether every worker of the plan is there and introduced."""
        return len(self.peers) == len(self.placement)

    def present(self) -> list[Member]:
        """Who can be spoken to, by index."""
        return [member for member in self._in_order() if member.here]

    def place(self, hello: Hello, sender: bytes, now: float, start: int = 0) -> Member | Refused:
        """Gives the worker that says `hello` a place, or the one it has already. Refusals say what would work.

        One that is given a place begins at step `start`.
        """
        known = self._known(hello)
        if known is not None:
            known.sender, known.endpoint, known.heard = sender, hello.endpoint, now
            known.aware = known.aware or hello.incarnation == known.incarnation
            if not known.introduced and (known.aware or hello.endpoint):
                known.introduced, known.progressed = True, now  # from here on it is to make progress
            self.begun = self.begun or self.complete
            return known
        if hello.incarnation:
            return Refused(
                f"incarnation {hello.incarnation} of {hello.name} is not current: its stages were given to another "
                "process, or its run is over. Start the worker again",
                code=ExitCode.FAILED,
            )
        index = self._free_index(hello, now)
        if isinstance(index, Refused):
            return index
        member = self._placed(index, hello, sender, now, start)
        self.begun = self.begun or self.complete
        return member

    def current(self, incarnation: int) -> Member | None:
        """The worker that holds `incarnation`; None for a zombie's."""
        return next((member for member in self.members.values() if member.incarnation == incarnation), None)

    def former(self, incarnation: int) -> Member | None:
        """Who works under another incarnation since the broker's records were lost."""
        return next((member for member in self.members.values() if member.former == incarnation > 0), None)

    def is_foreign(self, incarnation: int) -> bool:
        """Whether `incarnation` was handed out after these records were written: they are lost, or too old.

        If there were none, and every place has been given to somebody who came, the run has begun anew, and whoever
        has another incarnation is a zombie. Records that were found are never right about it: whom they name may be
        the zombie.
        """
        confirmed = not self.recorded and not self.missing and all(each.sender for each in self.members.values())
        between = self.recorded < incarnation <= self.floor
        return not confirmed and (between or incarnation > max(self.incarnation, self.floor))

    def settle(self, kept: Mapping[int, Contact], step: int, floor: int, now: float) -> None:
        """Begins anew, from incarnation `floor` on, with the workers `kept`, which go on with what they have."""
        self.members.clear()
        self.recorded = self.floor = floor
        for index, voice in sorted(kept.items()):
            member = self._placed(index, voice.hello, voice.sender, now, step)
            member.introduced, member.former = True, voice.hello.incarnation
        self.since = self.since if kept else floor
        self.begun = True

    def hear(self, member: Member, sender: bytes, now: float) -> None:
        """The worker speaks, under its incarnation, from `sender`."""
        member.sender, member.heard, member.aware = sender, now, True

    def beat(self, member: Member, report: Report, now: float) -> None:
        """Takes in a heartbeat."""
        before = member.report
        member.report = report
        if before is None or before.actions != report.actions or member.idle:
            member.progressed = now
        if before is None or before.now != report.now:
            member.changed = now

    def free(self, member: Member) -> None:
        """Takes a worker's place away, so that another can have it."""
        self.members.pop(member.index, None)

    def reopen(self) -> None:
        """Takes all places away; incarnations go on."""
        self.members.clear()
        self.since = max(self.incarnation, self.floor)
        self.begun = False

    def grant_grace(self, now: float) -> None:
        """Begins all leases anew: the broker itself was away."""
        for member in self.members.values():
            member.heard = member.progressed = now

    def losses(self, now: float) -> list[WorkerLoss]:
        """Workers that should be at work and are not, each with the reason."""
        found = (loss_of(member, self.lease, now) for member in self.present())
        return [loss for loss in found if loss is not None]

    def facts(self) -> dict[str, object]:
        """What another broker needs in order to `adopt` the workers, as JSON's own types."""
        kept = [
            msgspec.to_builtins(msgspec.convert(member, _StoredMember, from_attributes=True))
            for member in self._in_order()
        ]
        return {"incarnation": self.incarnation, "since": self.since, "begun": self.begun, "members": kept}

    def adopt(self, facts: Mapping[str, object], now: float) -> None:
        """Takes over a former broker's workers, who keep their incarnations; each has a lease to speak up."""
        self.recorded = self.incarnation = msgspec.convert(facts["incarnation"], int)
        self.since = msgspec.convert(facts.get("since", 0), int)
        self.begun = msgspec.convert(facts["begun"], bool)
        for kept in msgspec.convert(facts["members"], list[_StoredMember]):
            stages = self.placement[kept.index]
            member = Member(stages=stages, heard=now, progressed=now, **msgspec.structs.asdict(kept))
            self.members[kept.index] = member

    def _in_order(self) -> Iterator[Member]:
        return (self.members[index] for index in sorted(self.members))

    def _known(self, hello: Hello) -> Member | None:
        """Who says hello again: it names its incarnation, or is a process that has not yet heard of its place.

        One that has known its incarnation and does not name it has forgotten everything: in a container, a restarted
        process may well have the same host name and process number.
        """
        if hello.incarnation:
            return self.current(hello.incarnation) or self.former(hello.incarnation)
        same = (member for member in self.members.values() if member.is_process_of(hello) and not member.aware)
        return next(same, None)

    def _free_index(self, hello: Hello, now: float) -> int | Refused:
        if hello.claim is None:
            fit = [index for index in self.missing if self._has_snapshots_of(index, hello)]
            return next(iter(fit or self.missing), Refused(self._full(), code=ExitCode.FAILED))
        if hello.claim >= len(self.placement):
            return Refused(
                f"there is no worker {hello.claim}: the plan has workers 0 to {len(self.placement) - 1}",
                code=ExitCode.USAGE,
            )
        owner = self.members.get(hello.claim)
        return hello.claim if owner is None else Refused(self._claimed(owner, now), code=ExitCode.FAILED)

    def _has_snapshots_of(self, index: int, hello: Hello) -> bool:
        """Whether it has said that it can begin there in a resumed run."""
        return hello.inspection is not None and set(self.placement[index]) <= set(hello.inspection.stages)

    def _full(self) -> str:
        owners = ", ".join(f"{member.index} is {member.process}" for member in self._in_order())
        return f"all {len(self.placement)} workers of the plan are there: {owners}. Stop one of them first"

    def _claimed(self, owner: Member, now: float) -> str:
        if not owner.sender:
            return (
                f"{stages_in_words(owner.stages)} had worker {owner.process} before the broker was started again, "
                "which may still be at work"
            )
        verb = "is" if len(owner.stages) == 1 else "are"
        way_out = "start this one without --index or stop the other" if self.missing else "stop the other first"
        return (
            f"{stages_in_words(owner.stages)} {verb} claimed by worker {owner.process}, "
            f"alive {max(0.0, now - owner.heard):.1f} s ago; {way_out}"
        )

    def _placed(self, index: int, hello: Hello, sender: bytes, now: float, start: int) -> Member:
        self.incarnation = max(self.incarnation, self.floor) + 1
        self.members[index] = Member(
            index,
            self.placement[index],
            self.incarnation,
            hello.name,
            hello.host,
            hello.pid,
            hello.endpoint,
            heard=now,
            start=start,
            sender=sender,
            introduced=bool(hello.endpoint),
            progressed=now,
        )
        return self.members[index]


class _StoredMember(msgspec.Struct, frozen=True):
    """What a store keeps of a `Member`."""

    index: int
    incarnation: int
    name: str
    host: str
    pid: int
    endpoint: str
    introduced: bool
    aware: bool
    start: int
    life: int
    former: int
