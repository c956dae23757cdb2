"""Answers Hellos, gives the places of lost workers to those on standby, and tells all workers who their peers are.

    Hello ──> assigned                           a place is free, or it is the worker's own
        ├───> standby ──(a place is free)──> assigned
        └───> refused

While it is not known at which step the stages start, all stand by: see `restart`.
"""

import msgspec

from stageline.broker.control.protocol import Assigned, Hello, Peers, Refused, Standby, Trim
from stageline.broker.membership.member import Member
from stageline.broker.membership.standby import StandbyWorkers

from .admission import mismatch, unreachable_queues
from .assignments import Assignments, Outgoing
from .events import EventLog
from .restart import Restart
from .run import RunConfig, RunOutcome
from .run_state import RunLifecycle, RunState


class Registration:
    """Of the workers of one run. Times are seconds since the epoch."""

    def __init__(
        self,
        run: str,
        config: RunConfig,
        lifecycle: RunLifecycle,
        assignments: Assignments,
        standby: StandbyWorkers,
        restart: Restart,
        events: EventLog,
    ) -> None:
        self._run = run
        self._config = config
        self._lifecycle = lifecycle
        self._assignments = assignments
        self._registry = assignments.registry
        self._checkpoints = assignments.checkpoints
        self._standby = standby
        self._restart = restart
        self._events = events
        self._announced: dict[int, tuple[int, str]] = {}  # the peers that all workers were told last

    def answer(self, hello: Hello, sender: bytes, outcome: RunOutcome | None, now: float) -> list[Outgoing]:
        if outcome is not None and self._belongs(hello):
            return [(sender, outcome.stop_message)]
        if self._outdates_records(hello):
            why = f"{hello.name} knows more of the run than the broker's records, which are lost or stale"
            self._restart.lose_records(why, now)
        newest = self._registry.incarnation
        match (
            mismatch(hello, self._config, outcome)
            or unreachable_queues(hello, self._registry.members.values())
            or self._decide(hello, sender, now)
        ):
            case Member() as member:
                return self.assign(member, new=member.incarnation > newest)
            case Refused() as refused:
                self._events.count("refused", f"{hello.name}: {refused.reason}")
                return [(sender, refused)]
            case Standby() as standby:
                self._assignments.note_restarted(hello)
                self._standby.add(hello, sender, now)
                return [(sender, standby)]
            case None:
                return []

    def promote(self, now: float) -> list[Outgoing]:
        """Gives the places of lost workers to those on standby."""
        self._standby.prune(now)
        vacant = self._registry.missing if self._registry.begun else []
        return [send for index in vacant for send in self._promote_to(index, now)]

    def assign(self, member: Member, *, new: bool = False) -> list[Outgoing]:
        """Sends a worker its place, its peers and the newest checkpoint."""
        if new:
            self._events.info(
                f"{member.label} is {member.process}, life {member.life}, incarnation {member.incarnation}"
            )
        start, keep = self._assignments.start_step(member), member.former > 0
        assigned = Assigned(self._run, member.index, member.incarnation, start, keep, self._registry.since)
        sends: list[Outgoing] = [(member.sender, assigned), *self._peers_for(member.sender)]
        if self._checkpoints.complete and self._config.snapshots:  # its announcement may have been missed
            sends.append((member.sender, Trim(self._checkpoints.complete)))
        return sends

    def _outdates_records(self, hello: Hello) -> bool:
        """Whether the worker belongs to this run and proves that the records are lost or stale."""
        other_run = hello.memory is not None and hello.memory.run != self._run
        return hello.plan == self._config.plan and not other_run and self._assignments.records_outdated_by(hello)

    def _belongs(self, hello: Hello) -> bool:
        """Whether the run's end is the end of this worker too."""
        return self._registry.current(hello.incarnation) is not None or hello.spare or hello in self._standby

    def _decide(self, hello: Hello, sender: bytes, now: float) -> Member | Refused | Standby | None:
        """A place, a refusal, or standby; None for a running worker that is to wait for the broker's decision."""
        state = self._lifecycle.state
        if state is RunState.RECONCILING:
            self._restart.collect(hello, sender, now)
            return None if hello.memory else Standby(self._restart.waiting_for, self._run)
        if state is RunState.RECONNECTING and not hello.incarnation:
            return Standby(self._restart.waiting_for)
        if hello.spare and not self._registry.begun:
            return Standby("the run has not begun; a spare takes the place of a lost worker")
        if state is RunState.CHOOSING_CHECKPOINT and self._may_be_placed(hello):
            return Standby(self._restart.waiting_for, self._run, self._restart.polled_step)
        found = self._assignments.register(hello, sender, now)
        if isinstance(found, Refused) and self._assignments.may_stand_by(hello):
            return Standby(found.reason)
        self._standby.remove(hello)
        return found

    def _may_be_placed(self, hello: Hello) -> bool:
        """Whether it can have a place in a resumed run; a former worker, or an impossible claim, cannot."""
        return not hello.incarnation and (hello.claim is None or hello.claim < len(self._registry.placement))

    def _peers_for(self, sender: bytes) -> list[Outgoing]:
        """To all workers if the peers have changed, else to `sender` only."""
        peers = self._registry.peers
        if not self._registry.complete:
            return []
        if peers == self._announced:
            return [(sender, Peers(peers))]
        self._announced = peers
        self._events.info(f"run {self._run}: all workers have joined")
        return self._assignments.broadcast(Peers(peers))

    def _promote_to(self, index: int, now: float) -> list[Outgoing]:
        contact = self._standby.take(index)
        if contact is None:
            return []
        hello = msgspec.structs.replace(contact.hello, claim=index)
        member = self._assignments.register(hello, contact.sender, now)
        if isinstance(member, Refused):
            return []
        member.promoted = True
        return self.assign(member, new=True)
