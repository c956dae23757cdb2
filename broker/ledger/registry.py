"""The places of the plan: which worker has which, which are empty until a replacement comes, and who waits for one.

    Hello ──> present ──> finished ──> left
                 └──────────┴────────> lost     by the rule of `member.loss_of`

    lost ──> pending, place empty ──(a worker is placed)──> pending, place taken ──(it completes an action)──> done
                  └──(no worker comes in time)──> the run is given up

The script of a scripted run has the last place. Times are seconds since the epoch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stageline.broker.control.messages import Hello, Refused, Report
from stageline.broker.ledger.member import Leases, Member, MemberStatus, WorkerLoss, loss_of, may_take
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.schedule import Placement


class Replacement(msgspec.Struct):
    """Of the worker of place `index`, whose process was `pid` on `host`. Times are seconds since the epoch."""

    index: int
    since: float  # when the worker was found to be lost
    why: str
    pid: int
    awaited: float  # the deadline for a replacement to come counts from here
    how: str = ""  # its end or its silence alone, continuing a sentence about it
    host: str = ""


class Replacements:
    """The pending replacements, and the counts of all."""

    def __init__(self) -> None:
        self.pending: dict[int, Replacement] = {}  # by index
        self.in_a_row: Counter[int] = Counter()  # by index: replaced since the newest complete checkpoint
        self.ever: Counter[int] = Counter()  # by index: replaced in this run

    def generation(self, index: int) -> int:
        """Counts the workers that have had the place, from 1: the present one's number, or the next one's."""
        return self.ever[index] + 1

    def count(self, index: int) -> None:
        """A worker, or a process that was to become one, was lost."""
        self.in_a_row[index] += 1
        self.ever[index] += 1

    def clear(self) -> None:
        """No replacement is pending; the run's total stays."""
        self.pending.clear()
        self.in_a_row.clear()

    def restart_deadlines(self, now: float) -> None:
        """The broker itself was away."""
        for replacement in self.pending.values():
            replacement.awaited = now


MOST = 1000  # processes at a time, beside one for each place
SILENCE = 3.0  # seconds after which a worker on standby, which should send Hello every second, is gone

ProcessKey = tuple[str, str, int, str]


@dataclass(frozen=True, slots=True)
class Contact:
    """A process without a place: its newest Hello, its address, when it was last seen, and when it came (seconds since
    the epoch)."""

    hello: Hello
    sender: bytes
    last_seen: float
    came: float = 0.0


class StandbyWorkers(dict[ProcessKey, Contact]):
    """The contacts on standby by `process_key`, in the order in which they came; a repeated Hello keeps its turn."""

    def take(self, index: int, stages: Sequence[int], *, length_known: bool = True) -> Contact | None:
        """Removes and returns the first process that accepts place `index`, of `stages`, and lacks nothing for it."""
        able = ((key, contact.hello) for key, contact in self.items() if length_known or not contact.hello.needs_length)
        found = next((key for key, hello in able if may_take(hello.claim, index, stages)), None)
        return None if found is None else self.pop(found)

    def prune(self, now: float) -> None:
        """Removes workers that have become silent."""
        for key in [key for key, contact in self.items() if now - contact.last_seen >= SILENCE]:
            del self[key]


def process_key(hello: Hello) -> ProcessKey:
    """What tells processes apart; by the token, which no one is shown, also one that names itself as another."""
    return hello.name, hello.host, hello.pid, hello.token


# What a store keeps of a member.
_STORED = (
    "index", "incarnation", "name", "host", "pid", "endpoint", "introduced", "aware", "start", "generation", "former",
    "token", "promoted",
)  # fmt: skip


@dataclass(slots=True)
class Registry:
    """Gives places and incarnations, records heartbeats, finds lost workers."""

    placement: Placement
    leases: Leases
    incarnation: int = 0  # the highest given out
    members: dict[int, Member] = field(default_factory=dict)  # by index
    begun: bool = False  # every worker of the plan was present at the same time once
    recorded: int = 0  # the highest incarnation in the records that were restored
    floor: int = 0  # incarnations given out from now on are above it
    labels: Sequence[tuple[str, ...]] = ()  # of each place's stages, where stages have replicas
    since: int = 0  # no worker of this incarnation or an older one still runs: the run was restarted as a whole

    @property
    def missing(self) -> list[int]:
        """The indexes of empty places."""
        return [index for index in range(len(self.placement)) if index not in self.members]

    @property
    def peers(self) -> dict[int, tuple[int, str]]:
        """Where the queues of introduced workers are: index -> (incarnation, endpoint)."""
        return {each.index: (each.incarnation, each.endpoint) for each in self._in_order() if each.introduced}

    @property
    def complete(self) -> bool:
        """Whether every worker of the plan is present and introduced."""
        return len(self.peers) == len(self.placement)

    def reachable(self) -> list[Member]:
        """Workers that messages are sent to, by index."""
        return [member for member in self._in_order() if member.reachable]

    def register(self, hello: Hello, sender: bytes, now: float, start: int = 0) -> Member | Refused:
        """Gives the sender of `hello` a place, which begins at step `start`, or confirms the one it has.

        Refusals say what would work.
        """
        member = self._known(hello)
        if member is not None:
            self._reconnect(member, hello, sender, now)
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
            member = self._place(index, hello, sender, now, start)
            member.counted.update(member.stages)
        self.begun = self.begun or self.complete
        return member

    def current(self, incarnation: int) -> Member | None:
        """The worker that holds `incarnation`; None for a stale one."""
        return next((member for member in self.members.values() if member.incarnation == incarnation), None)

    def renewed(self, incarnation: int) -> Member | None:
        """The worker that held `incarnation` before the records were lost, and was given a new one since."""
        return next((member for member in self.members.values() if member.former == incarnation > 0), None)

    def is_unknown(self, incarnation: int) -> bool:
        """Whether `incarnation` was given out after these records were written: they are lost or stale.

        If there were no records, and every place was taken by a worker that contacted this broker, then the run has
        started over, and another incarnation is a stale one. Restored records cannot prove an incarnation current: the
        worker they name may be stale.
        """
        confirmed = not self.recorded and not self.missing and all(each.sender for each in self.members.values())
        between = self.recorded < incarnation <= self.floor
        return not confirmed and (between or incarnation > max(self.incarnation, self.floor))

    def reset(self, kept: Mapping[int, Contact], step: int, floor: int, now: float) -> None:
        """Starts over above incarnation `floor`, with the workers `kept`, which keep their state."""
        self.members.clear()
        self.recorded = self.floor = floor
        for index, contact in sorted(kept.items()):
            member = self._place(index, contact.hello, contact.sender, now, step)
            member.introduced, member.former = True, contact.hello.incarnation
        self.since = self.since if kept else floor
        self.begun = True

    def note_contact(self, member: Member, sender: bytes, now: float) -> None:
        """A message under the worker's incarnation arrived from `sender`."""
        member.sender, member.last_seen, member.aware = sender, now, True
        member.superseded = False

    def note_report(self, member: Member, report: Report, now: float) -> None:
        before = member.report
        member.report = report
        if before is None or before.actions != report.actions or report.waiting:
            member.last_progress = now
        if before is None or before.now != report.now:
            member.activity_since = now

    def free(self, member: Member) -> None:
        """Takes the worker's place away, so that another can have it."""
        self.members.pop(member.index, None)

    def free_all(self) -> None:
        """Takes all places away; incarnations keep growing."""
        self.members.clear()
        self.since = max(self.incarnation, self.floor)
        self.begun = False

    def restart_leases(self, now: float) -> None:
        """The broker itself was away."""
        for member in self.members.values():
            member.last_seen = member.last_progress = now

    def losses(self, now: float) -> list[WorkerLoss]:
        """Workers that should be at work and are not, each with the reason."""
        found = (loss_of(member, self.leases, now) for member in self.reachable())
        return [loss for loss in found if loss is not None]

    def facts(self) -> dict[str, object]:
        """What is stored for `restore`, as JSON's own types."""
        kept = [{name: getattr(member, name) for name in _STORED} for member in self._in_order()]
        return {"incarnation": self.incarnation, "since": self.since, "begun": self.begun, "members": kept}

    def restore(self, facts: Mapping[str, object], now: float) -> None:
        """Takes over a former broker's workers under their incarnations; each has a lease to reconnect."""
        self.recorded = self.incarnation = msgspec.convert(facts["incarnation"], int)
        self.since = msgspec.convert(facts.get("since", 0), int)
        self.begun = msgspec.convert(facts["begun"], bool)
        for kept in msgspec.convert(facts["members"], list[dict[str, Any]]):
            index = kept["index"]
            stages = {"stages": self.placement[index], "labels": self._labels(index)}
            place = {**stages, "last_seen": now, "last_progress": now}
            self.members[index] = msgspec.convert({**kept, **place}, Member)

    def recall_finished(self) -> None:
        """The run had finished: each worker has said so to the former broker. A script does not say so; it leaves."""
        for member in self.members.values():
            if not member.is_script:
                member.status = MemberStatus.FINISHED

    def _labels(self, index: int) -> tuple[str, ...]:
        return self.labels[index] if self.labels else ()

    def _in_order(self) -> Iterator[Member]:
        return (self.members[index] for index in sorted(self.members))

    def _known(self, hello: Hello) -> Member | None:
        """The member that sends Hello again: it names its incarnation, or its assignment has not reached it.

        A process that has used its incarnation and does not name it has restarted: in a container it may well have the
        same host name and process number.
        """
        if hello.incarnation:
            return self.current(hello.incarnation) or self.renewed(hello.incarnation)
        unaware = (member for member in self.members.values() if not member.aware)
        key = process_key(hello)
        return next((each for each in unaware if (each.name, each.host, each.pid, each.token) == key), None)

    def _reconnect(self, member: Member, hello: Hello, sender: bytes, now: float) -> None:
        member.sender, member.endpoint, member.last_seen = sender, hello.endpoint, now
        member.aware = member.aware or hello.incarnation == member.incarnation
        if not member.introduced and (member.aware or hello.endpoint):
            member.introduced, member.last_progress = True, now  # from here on it is expected to make progress

    def _free_index(self, hello: Hello, now: float) -> int | Refused:
        if hello.claim is None:
            # In a resumed run, a place to begin at with snapshots that it has verified; else any.
            read = set(hello.inspection.stages) if hello.inspection is not None else set()
            free = [index for index in self.missing if may_take(None, index, self.placement[index])]
            fit = [index for index in free if read.issuperset(self.placement[index])]
            workers = [member for member in self._in_order() if not member.is_script]
            owners = ", ".join(f"{member.index} is {member.process}" for member in workers)
            full = f"all {len(workers)} workers of the plan have joined: {owners}. Stop one of them first"
            return next(iter(fit or free), Refused(full, code=ExitCode.FAILED))
        if hello.claim >= len(self.placement):
            workers_known = sum(map(bool, self.placement))
            return Refused(
                f"there is no worker {hello.claim}: the plan has workers 0 to {workers_known - 1}",
                code=ExitCode.USAGE,
            )
        owner = self.members.get(hello.claim)
        return hello.claim if owner is None else Refused(self._claimed(owner, now), code=ExitCode.FAILED)

    def _claimed(self, owner: Member, now: float) -> str:
        if owner.is_script:
            ago = f"{max(0.0, now - owner.last_seen):.1f} s ago"
            return f"the run has its script: {owner.process}, alive {ago}; stop it first, or wait until it is lost"
        if not owner.sender:
            return (
                f"{owner.titles} belonged to worker {owner.process} before the broker restarted; "
                "it may still be running"
            )
        verb = "is" if len(owner.stages) == 1 else "are"
        way_out = "start this one without --index or stop the other" if self.missing else "stop the other first"
        return (
            f"{owner.titles} {verb} claimed by worker {owner.process}, "
            f"alive {max(0.0, now - owner.last_seen):.1f} s ago; {way_out}"
        )

    def _place(self, index: int, hello: Hello, sender: bytes, now: float, start: int) -> Member:
        self.incarnation = max(self.incarnation, self.floor) + 1
        self.members[index] = Member(
            index,
            self.placement[index],
            self.incarnation,
            hello.name,
            hello.host,
            hello.pid,
            hello.endpoint,
            last_seen=now,
            start=start,
            sender=sender,
            introduced=bool(hello.endpoint),
            last_progress=now,
            token=hello.token,
            labels=self._labels(index),
        )
        return self.members[index]
