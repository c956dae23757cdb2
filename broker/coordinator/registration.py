"""Answers Hellos, gives the places of lost workers to those on standby, and tells all workers who their peers are.

    Hello ──> assigned                           a place is free, or it is the worker's own
        ├───> standby ──(a place is free)──> assigned
        └───> refused

While it is not known at which step the stages start, all stand by: see `restart`.
"""

from contextlib import suppress

import msgspec

from stageline.broker.control.messages import (
    CONTROL_VERSION,
    Assigned,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Peers,
    Refused,
    Report,
    Standby,
)
from stageline.broker.control.records import RunLength
from stageline.broker.ledger.member import Member, may_take
from stageline.broker.ledger.recovery import is_gone
from stageline.broker.ledger.registry import MOST, Contact, process_key
from stageline.pipeline.addresses import Reach, transport_of
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import differences

from .lifecycle import RunState
from .records import RunRecords
from .restart import Restart
from .run import RunConfig

UNDECIDED = 3.0  # seconds that a newcomer stands by at most until those that load their models are heard again

FromMember = Report | Finished | Failed | Goodbye


class Registration:
    """Of the workers of one run. Times are seconds since the epoch."""

    def __init__(self, run: RunRecords, restart: Restart) -> None:
        self._run = run
        self._restart = restart
        self._announced: dict[int, tuple[int, str]] = {}  # the peers that all workers were sent last

    def answer(self, hello: Hello, sender: bytes, now: float) -> None:
        known = process_key(hello) in self._run.standby or self._run.registry.current(hello.incarnation) is not None
        if self._run.outcome is not None and (hello.spare or known):  # the run's end is the end of this worker too
            self._run.outgoing.append((sender, self._run.outcome.stop_message))
            return
        if self._outdates_records(hello):
            self._restart.lose_records(
                f"{hello.name} knows more of the run than the broker's records, which are lost or stale", now
            )
        newest = self._run.registry.incarnation
        match self._mismatch(hello) or self._unreachable_queues(hello) or self._decide(hello, sender, now):
            case Member() as member:
                self.assign(member, new=member.incarnation > newest)
            case Refused() as refused:
                self._run.events.count("refused", f"{hello.name}: {refused.reason}")
                self._run.note_declined(hello.host, hello.pid, refused.reason)
                self._run.outgoing.append((sender, refused))
            case Standby() as standby:
                if (predecessor := self._predecessor(hello)) is not None:
                    predecessor.superseded = not predecessor.sender
                self._stand_by(hello, sender, now)
                self._run.outgoing.append((sender, standby))

    def _stand_by(self, hello: Hello, sender: bytes, now: float) -> None:
        """Keeps the Hello without the settings, which are the run's; not if too many stand by already."""
        key, standby = process_key(hello), self._run.standby
        if key in standby or len(standby) < MOST + len(self._run.registry.placement):
            kept = msgspec.structs.replace(hello, settings={})
            standby[key] = Contact(kept, sender, now, self._came(hello, now))

    def answer_unknown(self, message: FromMember, sender: bytes) -> None:
        """A worker whose incarnation may only be missing in the records gets no answer before it sends Hello."""
        incarnation = message.incarnation
        renewed = self._run.registry.renewed(incarnation)
        unknown = self._run.config.restarts > 0 and self._run.registry.is_unknown(incarnation)
        if renewed is not None:
            renewed.sender = sender
            self.assign(renewed)
        elif self._run.lifecycle.state is not RunState.RECONCILING and not unknown:
            self._run.events.count(
                "fenced", f"{type(message).__name__} of incarnation {incarnation}, which is not current"
            )
            reason = (
                f"incarnation {incarnation} is not current in run {self._run.id}: its stages belong to another "
                "process, or its run is over. Stop this worker"
            )
            self._run.outgoing.append((sender, Refused(reason, code=ExitCode.FAILED)))

    def promote(self, now: float) -> None:
        """Gives the places of lost workers to those on standby."""
        self._run.standby.prune(now)
        for index in self._run.registry.missing if self._run.registry.begun else []:
            known = self._run.length is not None
            contact = self._run.standby.take(index, self._run.config.placement[index], length_known=known)
            if contact is None:
                continue
            claims = msgspec.structs.replace(contact.hello, claim=index)
            member = self._register(claims, contact.sender, now, promoted=True)
            if isinstance(member, Member):
                self.assign(member, new=True)

    def assign(self, member: Member, *, new: bool = False) -> None:
        """Sends a worker its place, its peers and the newest checkpoint."""
        if new:
            self._run.events.infos.append(
                f"{member.label} is {member.process}, generation {member.generation}, incarnation {member.incarnation}"
            )
        self._run.outgoing.append((member.sender, self._place_of(member)))
        self._inform(member)

    def assign_again(self) -> None:
        """After the records were lost: sends all workers that keep running their places. First of all: what else they
        are told is sealed with secrets that come with these."""
        members = self._run.registry.reachable()
        self._run.outgoing += [(member.sender, self._place_of(member)) for member in members]
        for member in members:
            self._inform(member)

    def _place_of(self, member: Member) -> Assigned:
        return Assigned(
            self._run.id,
            member.index,
            member.incarnation,
            step=self._start_step(member),
            keep=member.former > 0,
            since=self._run.registry.since,
            secret=b"" if member.aware else self._run.keys.of_incarnation(member.incarnation),
            queue_key=self._run.keys.of_queues,
            length=self._run.length,
            orders=tuple(self._run.orders.orders),
            closed=self._run.orders.closed,
        )

    def _inform(self, member: Member) -> None:
        self._send_peers(member.sender)
        complete = self._run.checkpoints.complete if self._run.config.snapshots else 0
        if complete and (announcement := self._run.announcement(complete)) is not None:  # it may have been missed
            self._run.outgoing.append((member.sender, announcement))

    def _start_step(self, member: Member) -> int:
        """The step that `member` is told to begin at."""
        ledger = self._run.ledger
        if self._run.config.snapshots:
            return member.start
        return min((ledger.finished[stage] for stage in member.stages), default=ledger.finished_floor)

    def _send_peers(self, sender: bytes) -> None:
        """To all workers if the peers have changed, else to `sender` only."""
        registry = self._run.registry
        if not registry.complete:
            return
        peers = Peers(registry.peers)
        if peers.workers == self._announced:
            self._run.outgoing.append((sender, peers))
        else:
            self._announced = peers.workers
            self._run.events.infos.append(f"run {self._run.id}: all workers have joined")
            self._run.broadcast(peers)

    def _decide(self, hello: Hello, sender: bytes, now: float) -> Member | Refused | Standby | None:
        """A place, a refusal, or standby; None for a running worker that is to wait for the broker's decision."""
        restart = self._restart
        if self._run.lifecycle.state is RunState.RECONCILING:
            restart.reconciliation.add(hello, sender, now)
            return None if hello.memory else Standby(restart.waiting_for, self._run.id)
        if self._run.lifecycle.state is RunState.RECONNECTING and not hello.incarnation:
            return Standby(restart.waiting_for)
        if hello.spare and not self._run.registry.begun:
            return Standby("the run has not begun; a spare takes the place of a lost worker")
        possible = hello.claim is None or hello.claim < len(self._run.registry.placement)
        if self._run.lifecycle.state is RunState.CHOOSING_CHECKPOINT and possible and not hello.incarnation:
            return Standby(restart.waiting_for, self._run.id, restart.poll.step)
        if hello.needs_length and not hello.incarnation and self._run.length is None:
            return Standby("no worker that has the data has come yet, and only those know how many steps the run has")
        found = self._register(hello, sender, now)
        if isinstance(found, Refused):
            silent = self._silent_owners(hello, now)
            for owner in silent:
                # One that loads its model is silent meanwhile. One that this broker has heard has its lease: a name and
                # a host prove nothing, and a paused process is silent too.
                owner.superseded = owner.introduced and owner.host == hello.host and not owner.sender
            if silent or self._may_stand_by(hello):
                return Standby(found.reason)
        self._run.standby.pop(process_key(hello), None)
        return found

    def _register(self, hello: Hello, sender: bytes, now: float, *, promoted: bool = False) -> Member | Refused:
        """Gives a place, or refuses. What it gave is stored."""
        found = self._run.registry.register(hello, sender, now, self._run.checkpoints.complete)
        if isinstance(found, Member):
            found.generation = self._run.replacements.generation(found.index)
            found.promoted = found.promoted or promoted
            self._run.length = self._run.length or hello.length
            self._run.save()
        return found

    def _may_stand_by(self, hello: Hello) -> bool:
        """Whether a worker for which there is no place may stand by until one becomes free.

        A spare may. So may a worker that was restarted before its loss was noticed, or after its place was given away,
        or while its place's owner has not reconnected to this broker. Two that claim one place from the beginning may
        not: that is a user's mistake. Nor may another script while there is one, which may run for days.
        """
        if not self._run.config.restarts or hello.incarnation:
            return False
        given_away = hello.claim is not None and self._run.replacements.generation(hello.claim) > 1
        owners = self._run.registry.members.values()
        unconfirmed = any(not owner.sender for owner in owners if may_take(hello.claim, owner.index, owner.stages))
        restarted = self._predecessor(hello) is not None and not self._claims_script(hello)
        return hello.spare or given_away or unconfirmed or restarted

    def _silent_owners(self, hello: Hello, now: float) -> list[Member]:
        """Owners of the places that a newcomer could have from which nothing has come since the newcomer came: a worker
        that was killed and started again by hand comes while its predecessor still has the place. Only processes of its
        own host, and only until each of them either has sent a message or is declared lost, which one that loads its
        model may take long for.
        Another script may come from any host, and wait until the one before it is lost.
        """
        came = self._came(hello, now)
        replaces = self._run.config.restarts > 0 or not self._run.registry.begun
        script = self._claims_script(hello)
        if hello.incarnation or not replaces:
            return []
        reachable = self._run.registry.reachable()
        owners = [owner for owner in reachable if may_take(hello.claim, owner.index, owner.stages)]
        silent = [owner for owner in owners if owner.last_seen <= came and (script or owner.host == hello.host)]
        return [owner for owner in silent if script or owner.introduced or now - came < UNDECIDED]

    def _claims_script(self, hello: Hello) -> bool:
        return hello.claim is not None and hello.claim == self._run.config.script

    def _came(self, hello: Hello, now: float) -> float:
        contact = self._run.standby.get(process_key(hello))
        return now if contact is None else contact.came

    def _predecessor(self, hello: Hello) -> Member | None:
        """The owner of the place that is claimed, if it seems to be the same worker before it was restarted."""
        owner = self._run.registry.members.get(hello.claim) if hello.claim is not None else None
        same = owner is not None and (owner.name, owner.host) == (hello.name, hello.host)
        return owner if same else None

    def _outdates_records(self, hello: Hello) -> bool:
        """Whether the worker belongs to this run and proves that the records are lost or stale."""
        memory = hello.memory
        if not self._run.config.restarts or hello.plan != self._run.config.plan:
            return False
        if memory is None:
            return self._has_lost_its_start(hello)
        ahead = self._run.lack_checkpoint(memory.complete, self._run.registry.current(hello.incarnation))
        return memory.run == self._run.id and (ahead or self._run.registry.is_unknown(hello.incarnation))

    def _has_lost_its_start(self, hello: Hello) -> bool:
        """Whether the records must be stale, since the snapshot that a worker was told to begin with was deleted after
        a newer one."""
        member = self._run.registry.current(hello.incarnation)
        every = range(self._run.config.schedule.copies)  # the script begins where all stages do
        return member is not None and is_gone(member.start, member.stages or every, hello.snapshots or ())

    def _mismatch(self, hello: Hello) -> Refused | None:
        """Refusal of a worker of another version or plan, or of a run that is over; None if the worker fits."""
        config, outcome = self._run.config, self._run.outcome
        if hello.version != CONTROL_VERSION:
            return Refused(
                f"{hello.name} uses control protocol version {hello.version}, the broker version {CONTROL_VERSION}; "
                "install the same stageline on both machines",
                code=ExitCode.FAILED,
            )
        if hello.plan != config.plan:
            return Refused(
                f"{hello.name} has another plan than the broker: {_difference(hello, config)}", code=ExitCode.REFUSED
            )
        if (theirs := _restarts(hello)) is not None and (theirs > 0) != (config.restarts > 0):
            return Refused(
                f"{hello.name} has recovery.restarts = {theirs}, the broker has {config.restarts}: either all workers "
                "write snapshots, or none does",
                code=ExitCode.REFUSED,
            )
        known = self._run.length
        if hello.length is not None and known is not None and hello.length != known:
            return Refused(
                f"{hello.name} has data for {_steps(hello.length)}, the run has {_steps(known)}: give every worker "
                "that reads data the same",
                code=ExitCode.REFUSED,
            )
        if outcome is not None:
            return Refused(
                f"the run is over ({outcome.reason}); start the broker again for a new one", code=outcome.code
            )
        return None

    def _unreachable_queues(self, hello: Hello) -> Refused | None:
        """Refusal of a worker whose queues are at a file, where workers on other hosts cannot reach them; None if all
        can."""
        for other in self._run.registry.members.values():
            if (
                transport_of(hello.endpoint).reach < Reach.NETWORK
                and other.endpoint
                and other.host != hello.host
                and other.index != hello.claim
            ):
                return Refused(
                    f"the queues of {hello.name} are at {hello.endpoint} on host {hello.host}, where {other.title} "
                    f"on host {other.host} cannot reach them; set queues.url to tcp://ADDRESS:0, or to redis://..., "
                    "for every worker",
                    code=ExitCode.REFUSED,
                )
        return None


def _steps(length: RunLength) -> str:
    epoch = f", {length.epoch} in an epoch" if length.epoch else ""
    return f"{length.training} training steps and {length.evaluation} batches to evaluate{epoch}"


def _restarts(hello: Hello) -> int | None:
    """`recovery.restarts` of the worker's plan, 0 without snapshots; None if its settings do not include it."""
    match hello.settings:
        case {"recovery": {"restarts": int(restarts), "snapshot_every": int(every)}}:
            return restarts if every else 0
        case _:
            return None


def _difference(hello: Hello, config: RunConfig) -> str:
    with suppress(TypeError, RecursionError):  # the settings received are not a plan's
        found = "; ".join(map(str, differences(hello.settings, config.settings)))
        if found and hello.settings:
            return f"{found} (here: the worker, there: the broker)"
    return f"its digest is {hello.plan[:12]}, the broker's {config.plan[:12]}; give both the same plan file"
