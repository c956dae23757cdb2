"""Which worker has which stages, and the step that the next one begins at.

A place, its incarnation and the complete checkpoint are decided together and stored in one write: a broker killed at
any moment cannot leave an incarnation that begins at another step than its worker was told.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stageline.broker.control.protocol import FromBroker, Hello, Refused, Report
from stageline.broker.ledger.ledger import IllegalTransition, Ledger
from stageline.broker.membership.failure_detector import WorkerLoss
from stageline.broker.membership.member import Member
from stageline.broker.membership.registry import Registry
from stageline.broker.membership.replacements import Replacement, Replacements
from stageline.broker.recovery.checkpoint_tracker import CheckpointTracker, is_gone
from stageline.broker.recovery.lost_work import LostWork
from stageline.broker.recovery.reconcile import ReconciledState
from stageline.broker.stores.base import Store

from .run import RunConfig

_FACT = "registry"

Outgoing = tuple[bytes, FromBroker]  # recipient, message


@dataclass(frozen=True, slots=True)
class Assignments:
    """Changes the registry, the checkpoints, the replacements and the ledger of a run together, and stores them.

    Times are seconds since the epoch.
    """

    config: RunConfig
    store: Store
    ledger: Ledger
    registry: Registry
    checkpoints: CheckpointTracker
    replacements: Replacements
    lost_work: LostWork

    @property
    def trimmable(self) -> int:
        """The step before which no worker, and no replacement, needs a message."""
        return self.checkpoints.complete if self.config.snapshots else self.ledger.finished_floor

    @property
    def restarts_from_checkpoint(self) -> bool:
        """Whether no worker has a place in a run that was running before: all stages begin at a checkpoint."""
        unplaced = not self.registry.begun and not self.registry.members
        return unplaced and self.config.snapshots and self.checkpoints.complete > 0

    def start_step(self, member: Member) -> int:
        """The step that `member` is told to begin at."""
        return member.start if self.config.snapshots else min(self.ledger.finished[stage] for stage in member.stages)

    def broadcast(self, message: FromBroker) -> list[Outgoing]:
        """`message` to every reachable worker with a place."""
        return [(member.sender, message) for member in self.registry.reachable() if member.sender]

    def register(self, hello: Hello, sender: bytes, now: float) -> Member | Refused:
        """Gives a place, or refuses. What it gave is stored."""
        found = self.registry.register(hello, sender, now, self.checkpoints.complete)
        if isinstance(found, Member):
            found.life = self.replacements.life(found.index)
            self._store()
        return found

    def may_stand_by(self, hello: Hello) -> bool:
        """Whether a worker for which there is no place may stand by until one becomes free.

        A spare may. So may a worker that was restarted before its loss was noticed, or after its place was given away,
        or while its place's owner has not reconnected to this broker. Two that claim one place from the beginning may
        not: that is a user's mistake.
        """
        if not self.config.restarts or hello.incarnation:
            return False
        given_away = hello.claim is not None and self.replacements.life(hello.claim) > 1
        unconfirmed = any(
            not member.sender for member in self.registry.members.values() if hello.claim in (None, member.index)
        )
        return hello.spare or given_away or unconfirmed or self._predecessor(hello) is not None

    def note_restarted(self, hello: Hello) -> None:
        """A worker on standby may be a restarted one: its predecessor counts as lost as soon as it is silent."""
        predecessor = self._predecessor(hello)
        if predecessor is not None:
            predecessor.superseded = True

    def records_outdated_by(self, hello: Hello) -> bool:
        """Whether the records must be lost or stale, since a worker of this run knows more."""
        if not self.config.restarts:
            return False
        if hello.memory is None:
            return self.has_lost_its_start(hello)
        return self.registry.is_unknown(hello.incarnation) or self.records_lack_checkpoint(
            hello.memory.complete, self.registry.current(hello.incarnation)
        )

    def records_lack_checkpoint(self, complete: int, member: Member | None) -> bool:
        """Whether the records must be stale, since `member` was told that a newer checkpoint is `complete`."""
        return self.config.restarts > 0 and member is not None and complete > self.checkpoints.complete

    def has_lost_its_start(self, hello: Hello) -> bool:
        """Whether the records must be stale, since the snapshot that a worker was told to begin with was deleted after
        a newer one."""
        member = self.registry.current(hello.incarnation)
        if member is None or hello.snapshots is None:
            return False
        return is_gone(member.start, member.stages, hello.snapshots)

    def workers_at_work(self, now: float) -> bool | None:
        """Whether workers of a restarted broker's run are still running; None while they may still reconnect.

        If some are lost, the others are of use only if those can be replaced.
        """
        members, lost = self.registry.members.values(), len(self.registry.losses(now))
        reconnected = [member for member in members if member.sender]
        if len(reconnected) == len(members) or (reconnected and self.config.restarts):
            return True
        return False if lost == len(members) or (lost and not self.config.restarts) else None

    def record_snapshots(self, report: Report, member: Member) -> list[IllegalTransition]:
        """Records the snapshots that `member` reports; completes a checkpoint if it can. Returns what was wrong."""
        own = [(stage, step) for stage, step in report.snapshots if stage in member.stages]
        added = [self.checkpoints.add(stage, step) for stage, step in own]
        completed = self.checkpoints.advance(self.ledger.finished_floor)
        if completed:
            self.replacements.note_checkpoint()
        if completed or any(added):
            self._store()
        foreign = (stage for stage, _ in report.snapshots if stage not in member.stages)
        return [IllegalTransition(f"stage {stage} is not its own") for stage in foreign]

    def vacate(self, loss: WorkerLoss, why: str, now: float) -> None:
        """Empties the place of a lost worker; its stages are back at the complete checkpoint. `why` is for people."""
        member = loss.member
        self.registry.free(member)
        self.checkpoints.forget(member.stages)
        self.replacements.count(member.index)
        self.replacements.open(Replacement(member.index, now, why, member.pid, now))
        self.lost_work.add(member, self.ledger, self.checkpoints.complete, loss.why, now)
        self._go_back(member.stages)

    def count_failed_start(self, index: int) -> None:
        """A process that was to take the empty place `index` ended before it joined."""
        self.replacements.count(index)
        self._store()

    def restart_all(self, now: float) -> None:
        """Empties every place; all stages are back at the complete checkpoint."""
        why, complete = "ended before the run was resumed", self.checkpoints.complete
        for member in self.registry.members.values():
            self.lost_work.add(member, self.ledger, complete, why, now)
        self.registry.free_all()
        self.checkpoints.forget(self._stages)
        self.replacements.clear()
        self._go_back(self._stages)

    def restart_all_at(self, step: int) -> None:
        """Empties every place; all stages will begin at checkpoint `step`, whatever the records say."""
        self.registry.free_all()
        self.checkpoints.reset(step)
        self.ledger.reset(self._stages, step)
        self.store.go_back(self._stages, step)
        self._store()

    def apply_reconciled(self, state: ReconciledState, incarnation: int, now: float) -> None:
        """Replaces the records by what workers and disks know; `incarnation` is the highest that a worker named."""
        floor = max(self.registry.incarnation, incarnation, _unused_incarnation(now))
        self.registry.reset(state.kept, state.step, floor, now)
        self.checkpoints.reset(state.step)
        self.replacements.clear()
        for index in self.registry.missing:
            self.replacements.open(Replacement(index, now, "its worker did not reconnect", 0, now))
        for index, stages in enumerate(self.config.schedule.placement):
            kept = state.kept.get(index)
            memory = kept.hello.memory if kept is not None else None
            self.ledger.reset(stages, memory.step if memory is not None else state.step)
        self.store.go_back(self._stages, state.step)
        self._store()

    def restart_leases(self, now: float) -> None:
        """The broker itself was away."""
        self.registry.restart_leases(now)
        self.replacements.restart_deadlines(now)

    def restore(self, facts: Mapping[str, Mapping[str, object]], now: float) -> None:
        """Continues from what a former broker has stored."""
        self.registry.floor = _unused_incarnation(now) if self.config.restarts else 0
        if _FACT not in facts:
            return
        kept = facts[_FACT]
        self.registry.restore(kept, now)
        self.checkpoints.restore(kept["checkpoints"])
        self.ledger.reach(self.checkpoints.complete)  # a checkpoint found on the disks may be ahead of the records
        self.replacements.restore(kept["replacing"], now)
        self.lost_work.restore(kept.get("attempts", []))

    @property
    def _stages(self) -> range:
        return range(self.config.schedule.stages)

    def _predecessor(self, hello: Hello) -> Member | None:
        owner = self.registry.members.get(hello.claim) if hello.claim is not None else None
        same = owner is not None and (owner.name, owner.host) == (hello.name, hello.host)
        return owner if same else None

    def _go_back(self, stages: range | tuple[int, ...]) -> None:
        self.ledger.go_back(stages, self.checkpoints.complete)
        self.store.go_back(stages, self.checkpoints.complete)
        self._store()

    def _store(self) -> None:
        parts = {
            "checkpoints": self.checkpoints.facts(),
            "replacing": self.replacements.facts(),
            "attempts": self.lost_work.facts(),
        }
        self.store.put(_FACT, {**self.registry.facts(), **parts})


def _unused_incarnation(now: float) -> int:
    """An incarnation above all given out before `now`: no broker gives out one a millisecond."""
    return int(now * 1000)
