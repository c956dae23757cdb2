"""Watches over the workers: a lost one's place is emptied for another, or the run is given up, with the reason.

lost ──(may be replaced)──────> its place is empty ──(nobody comes)──> the run ends
  └──(often already, or it would end likewise again)──────────────────────^
"""

from dataclasses import dataclass

from stageline.broker.control.protocol import Exited
from stageline.broker.diagnosis.explain import Diagnosis, Prospect, diagnose
from stageline.broker.diagnosis.failure_report import failure_report
from stageline.broker.diagnosis.wait_graph import ClusterView
from stageline.broker.ledger.ledger import Ledger
from stageline.broker.membership.failure_detector import WorkerLoss, exit_in_words
from stageline.broker.membership.member import Member, MemberStatus, place_in_words
from stageline.broker.membership.standstill import Standstill
from stageline.pipeline.exit_code import ExitCode

from .assignments import Assignments
from .events import EventLog
from .run import RunConfig

# Exit statuses of a process that would end likewise if it were started again, and those that say more than "failed".
_DELIBERATE = frozenset({ExitCode.USAGE, ExitCode.REFUSED})
_PASSED_ON = frozenset({ExitCode.USAGE, ExitCode.SAVED, ExitCode.REFUSED, ExitCode.INTERRUPTED})


@dataclass(frozen=True, slots=True)
class RunFailure:
    """Why the run ends: `reason` for people, `code` the exit code."""

    reason: str
    code: int


class Supervision:
    """Of a run that has not ended. Times are seconds since the epoch."""

    def __init__(self, crew: Assignments, terms: RunConfig, ledger: Ledger, journal: EventLog) -> None:
        self._crew = crew
        self._terms = terms
        self._ledger = ledger
        self._journal = journal
        self._standstill = Standstill(terms.lease)

    def look(self, now: float) -> RunFailure | None:
        """Finds who is lost; the first reason to end the run, if there is one."""
        found = [self.lose(loss, now) for loss in self._crew.registry.losses(now)]
        return next(filter(None, found), None) or self._standing_still(now)

    def waited_too_long(self, now: float) -> RunFailure | None:
        """The end of a run to which nobody has come for an empty place."""
        gap = next(iter(self._crew.replacing.overdue(self._crew.registry.missing, now)), None)
        if gap is None:
            return None
        nobody = f"nobody came within {now - gap.awaited:.0f} s to take the place of {self._place(gap.index)}"
        return RunFailure(f"{nobody}: {self.diagnose(now, gap.index).text}", ExitCode.NO_WORKER)

    def lose(self, loss: WorkerLoss, now: float) -> RunFailure | None:
        """While the run waits for workers, one that is lost without a word of its exit only leaves its place."""
        member = loss.member
        if not self._crew.registry.begun and loss.status is None:
            self._crew.registry.free(member)
            self._journal.tell(f"{member.place} is free again: {member.process} {loss.why}")
            return None
        why = failure_report(loss, self._ledger, now)
        if not self._may_replace(member.index, loss.status):
            last_word = self._last_word(why, now) + self._often(member)
            member.standing = MemberStatus.LOST
            return RunFailure(last_word, _code(loss.status))
        self._crew.vacate(loss, why, now)
        self._journal.tell(f"{why}. Whoever takes its place begins at step {self._crew.checkpoints.complete}")
        return None

    def note_exit(self, exited: Exited, now: float) -> RunFailure | None:
        """A process is gone. Its worker is lost once its last words have had time to come."""
        member = self._crew.registry.members.get(exited.index)
        if member is None and exited.index in self._crew.registry.missing:
            return self._note_stillbirth(exited)
        if member is not None and member.pid == exited.pid and member.here:
            member.exited = now, exited.status
        return None

    def diagnose(self, now: float, worker: int | None = None) -> Diagnosis:
        """Why the run waits, or why `worker` does."""
        crew, terms = self._crew, self._terms
        scene = ClusterView(terms.schedule, crew.registry.members, crew.replacing.gaps, self._ledger, now)
        return diagnose(scene, Prospect(terms.lease, terms.patience, terms.restarts > 0), worker)

    def _note_stillbirth(self, exited: Exited) -> RunFailure | None:
        """A process that was to take an empty place is gone; unless it is the one whose loss has emptied it."""
        gap = self._crew.replacing.gaps.get(exited.index)
        if gap is not None and gap.pid == exited.pid:
            return None
        how = exit_in_words(exited.status)
        what = f"{self._place(exited.index)} {how} before it joined; its own output says why"
        if not self._may_replace(exited.index, exited.status):
            return RunFailure(what, _code(exited.status))
        self._crew.count_loss(exited.index)
        self._journal.tell(what)
        return None

    def _may_replace(self, index: int, status: int | None) -> bool:
        return status not in _DELIBERATE and self._crew.replacing.permits(index)

    def _standing_still(self, now: float) -> RunFailure | None:
        """Of a run in which all wait for each other: nothing will change that."""
        members = self._crew.registry.present()
        lasts = self._standstill.lasts(members, now)
        if lasts < self._standstill.bound or not self._crew.registry.complete:
            return None
        places = ", ".join(f"worker {member.index} at {member.endpoint} on host {member.host}" for member in members)
        return RunFailure(
            f"every worker has been waiting for another for {lasts:.0f} s: {self.diagnose(now).text}. "
            f"Can they reach each other's queues? They are: {places}. See queues.url",
            ExitCode.FAILED,
        )

    def _last_word(self, why: str, now: float) -> str:
        """Why a worker counts as lost, and who waited for it."""
        found = self.diagnose(now)
        if found.chain.harmless or not found.chain.lacks:
            return why
        return f"{why}. {found.text[0].upper()}{found.text[1:]}"

    def _often(self, member: Member) -> str:
        times = self._crew.replacing.times(member.index)
        if not times:
            return ""
        step, most = self._crew.checkpoints.complete, self._terms.restarts
        return f". It was replaced {times} times since checkpoint {step} (recovery.restarts is {most})"

    def _place(self, index: int) -> str:
        return place_in_words(index, self._terms.schedule.placement[index])


def _code(status: int | None) -> int:
    return status if status in _PASSED_ON else ExitCode.FAILED
