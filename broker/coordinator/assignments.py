"""Who works on which stages, and the step that whoever comes next begins at.

A place, its incarnation and the complete checkpoint are decided on together and stored in one write: there is no moment
at which a killed broker could leave an incarnation that begins at another step than it was told.
"""

from collections.abc import Mapping

from stageline.broker.control.protocol import FromBroker, Hello, Refused, Report
from stageline.broker.ledger.ledger import IllegalTransition, Ledger
from stageline.broker.membership.failure_detector import WorkerLoss
from stageline.broker.membership.member import Member
from stageline.broker.membership.registry import Registry
from stageline.broker.membership.replacements import Replacement, Replacements
from stageline.broker.recovery.checkpoint_tracker import CheckpointTracker, is_gone
from stageline.broker.recovery.lost_work import LostWork
from stageline.broker.recovery.reconcile import ReconciledState, Reconciliation
from stageline.broker.stores.base import Store

from .run import RunConfig

_FACT = "registry"

Outgoing = tuple[bytes, FromBroker]  # recipient, sentence


class Assignments:
    """The registry, the checkpoints and the replacements of a run. Times are seconds since the epoch."""

    def __init__(self, terms: RunConfig, store: Store, ledger: Ledger) -> None:
        self.registry = Registry(terms.schedule.placement, terms.lease)
        self.checkpoints = CheckpointTracker(terms.schedule.stages)
        self.replacing = Replacements(terms.restarts, terms.patience)
        self.attempts = LostWork()
        self._terms = terms
        self._store = store
        self._ledger = ledger

    @property
    def trimmable(self) -> int:
        """The step before which nobody, and no replacement, needs a message."""
        return self.checkpoints.complete if self._terms.snapshots else self._ledger.finished_floor

    def place(self, hello: Hello, sender: bytes, now: float) -> Member | Refused:
        """Gives a place, or says why there is none. What it gave is stored."""
        found = self.registry.place(hello, sender, now, self.checkpoints.complete)
        if isinstance(found, Member):
            found.life = self.replacing.life(found.index)
            self._keep()
        return found

    def settle(self, election: Reconciliation, verdict: ReconciledState, now: float) -> None:
        """Takes the verdict of the workers and the disks for the records that are lost."""
        floor = max(self.registry.incarnation, election.incarnation, _never_used(now))
        self.registry.settle(verdict.kept, verdict.step, floor, now)
        self.checkpoints.settle(verdict.step)
        self.replacing.begin_anew()
        for index in self.registry.missing:
            self.replacing.open(Replacement(index, now, "nobody who had it is there", 0, now))
        for index, stages in enumerate(self._terms.schedule.placement):
            kept = verdict.kept.get(index)
            memory = kept.hello.memory if kept is not None else None
            self._ledger.settle(stages, memory.step if memory is not None else verdict.step)
        self._store.go_back(range(self._terms.schedule.stages), verdict.step)
        self._keep()

    def find_again(self, step: int) -> None:
        """The records are lost, and nobody is at work: all stages will begin at `step`, which has snapshots."""
        self.registry.reopen()
        self.begin_at(step)

    def begin_at(self, step: int) -> None:
        """Nobody has a place: all stages will begin at `step`, whatever the records say."""
        stages = range(self._terms.schedule.stages)
        self.checkpoints.settle(step)
        self._ledger.settle(stages, step)
        self._store.go_back(stages, step)
        self._keep()

    def is_strange(self, incarnation: int) -> bool:
        """Whether the records must be lost, or older than the run, since they do not know a worker of it."""
        return self._terms.restarts > 0 and self.registry.is_foreign(incarnation)

    def is_behind(self, complete: int, incarnation: int) -> bool:
        """Whether the records must be older than the run, since a worker of it was told of a newer checkpoint."""
        known = self.registry.current(incarnation) is not None
        return self._terms.restarts > 0 and known and complete > self.checkpoints.complete

    def lacks_its_beginning(self, hello: Hello) -> bool:
        """Whether the records must be older than the run, since the snapshot that a worker was told to begin with was
        deleted after a newer one."""
        member = self.registry.current(hello.incarnation)
        if not self._terms.restarts or member is None or hello.snapshots is None:
            return False
        return is_gone(member.start, member.stages, hello.snapshots)

    def survives(self, now: float) -> bool | None:
        """Whether a run whose broker was killed has workers at work; None as long as they may yet say so.

        If some are gone, the others are of use only if those can be replaced.
        """
        members, lost = self.registry.members.values(), len(self.registry.losses(now))
        heard = [member for member in members if member.sender]
        if len(heard) == len(members) or (heard and self._terms.restarts):
            return True
        return False if lost == len(members) or (lost and not self._terms.restarts) else None

    def may_wait(self, hello: Hello) -> bool:
        """Whether a worker for which there is no place may stand by until one becomes free.

        A spare may; so may a worker that was started again before its loss was noticed, or after its place was given
        away, or while it is not known whether whoever has it is still there. Two that claim one place from the
        beginning may not: somebody has made a mistake.
        """
        if not self._terms.restarts or hello.incarnation:
            return False
        given_away = hello.claim is not None and self.replacing.life(hello.claim) > 1
        unheard = any(
            not member.sender for member in self.registry.members.values() if hello.claim in (None, member.index)
        )
        return hello.spare or given_away or unheard or self._predecessor(hello) is not None

    def note_successor(self, hello: Hello) -> None:
        """A worker that stands by may have been started again: if its predecessor is silent, that one is gone."""
        predecessor = self._predecessor(hello)
        if predecessor is not None:
            predecessor.succeeded = True

    def tell_all(self, sentence: FromBroker) -> list[Outgoing]:
        """Says `sentence` to everyone who has a place and can be spoken to."""
        return [(member.sender, sentence) for member in self.registry.present() if member.sender]

    def start_of(self, member: Member) -> int:
        """The step that `member` is told to begin at."""
        return member.start if self._terms.snapshots else min(self._ledger.finished[stage] for stage in member.stages)

    def note_snapshots(self, report: Report, member: Member) -> list[IllegalTransition]:
        """Takes in the snapshots that `member` reports; completes a checkpoint if it can. Returns what was wrong."""
        own = [(stage, step) for stage, step in report.snapshots if stage in member.stages]
        news = [self.checkpoints.add(stage, step) for stage, step in own]
        completed = self.checkpoints.advance(self._ledger.finished_floor)
        if completed:
            self.replacing.got_on()
        if completed or any(news):
            self._keep()
        foreign = (stage for stage, _ in report.snapshots if stage not in member.stages)
        return [IllegalTransition(f"stage {stage} is not its own") for stage in foreign]

    def vacate(self, loss: WorkerLoss, why: str, now: float) -> None:
        """Empties the place of a lost worker; its stages are back at the complete checkpoint. `why` is for people."""
        member, step = loss.member, self.checkpoints.complete
        self.registry.free(member)
        self.checkpoints.forget(member.stages)
        self.replacing.count(member.index)
        self.replacing.open(Replacement(member.index, now, why, member.pid, now))
        self.attempts.lose(member, self._ledger, step, loss.why, now)
        self._ledger.go_back(member.stages, step)
        self._store.go_back(member.stages, step)
        self._keep()

    def reopen(self, now: float) -> None:
        """Empties every place; all stages are back at the complete checkpoint."""
        stages = range(self._terms.schedule.stages)
        for member in self.registry.members.values():
            self.attempts.lose(member, self._ledger, self.checkpoints.complete, "ended before the run was resumed", now)
        self.registry.reopen()
        self.checkpoints.forget(stages)
        self.replacing.begin_anew()
        self._ledger.go_back(stages, self.checkpoints.complete)
        self._store.go_back(stages, self.checkpoints.complete)
        self._keep()

    @property
    def begins_anew(self) -> bool:
        """Whether nobody has a place in a run that has been at work before: all stages will begin at a checkpoint."""
        unplaced = not self.registry.begun and not self.registry.members
        return unplaced and self._terms.snapshots and self.checkpoints.complete > 0

    def count_loss(self, index: int) -> None:
        """A process that was to take the empty place `index` ended before it had said a word."""
        self.replacing.count(index)
        self._keep()

    def grant_grace(self, now: float) -> None:
        """All leases begin anew: the broker itself was away."""
        self.registry.grant_grace(now)
        self.replacing.grant_grace(now)

    def take_up(self, facts: Mapping[str, Mapping[str, object]], now: float) -> None:
        """Goes on from what a former broker has stored."""
        self.registry.floor = _never_used(now) if self._terms.restarts else 0
        if _FACT not in facts:
            return
        kept = facts[_FACT]
        self.registry.adopt(kept, now)
        self.checkpoints.adopt(kept["checkpoints"])
        self._ledger.reach(self.checkpoints.complete)  # one found on the disks may be ahead of the records
        self.replacing.adopt(kept["replacing"], now)
        self.attempts.adopt(kept.get("attempts", []))

    def _predecessor(self, hello: Hello) -> Member | None:
        owner = self.registry.members.get(hello.claim) if hello.claim is not None else None
        same = owner is not None and (owner.name, owner.host) == (hello.name, hello.host)
        return owner if same else None

    def _keep(self) -> None:
        parts = {
            "checkpoints": self.checkpoints.facts(),
            "replacing": self.replacing.facts(),
            "attempts": self.attempts.facts(),
        }
        self._store.put(_FACT, {**self.registry.facts(), **parts})


def _never_used(now: float) -> int:
    """An incarnation above all that can have been handed out before `now`: nobody hands out one a millisecond."""
    return int(now * 1000)
