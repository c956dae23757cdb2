"""Watches over the workers: empties a lost one's place for a replacement, or gives up the run, with the reason.

lost ──(may be replaced)──────────> its place is empty ──(no replacement in time)──> the run ends
  └──(replaced too often already, or it would fail again)──────────────────────────────^
"""

from stageline.broker.control.protocol import Exited
from stageline.broker.diagnosis.explain import Diagnosis, Prospect, diagnose
from stageline.broker.diagnosis.failure_report import failure_report
from stageline.broker.diagnosis.wait_graph import ClusterState
from stageline.broker.membership.failure_detector import Standstill, WorkerLoss, describe_exit
from stageline.broker.membership.member import Member, MemberStatus, worker_label
from stageline.pipeline.errors import ExitCode

from .assignments import Assignments
from .events import EventLog
from .run import RunConfig, RunFailure

# Exit statuses of a process that would fail again if it were restarted, and those that are the run's exit code too.
_DELIBERATE = frozenset({ExitCode.USAGE, ExitCode.REFUSED})
_PASSED_ON = frozenset({ExitCode.USAGE, ExitCode.SAVED, ExitCode.REFUSED, ExitCode.INTERRUPTED})


class Supervision:
    """Of a run that is not over. Times are seconds since the epoch."""

    def __init__(self, config: RunConfig, assignments: Assignments, events: EventLog) -> None:
        self._config = config
        self._assignments = assignments
        self._ledger = assignments.ledger
        self._registry = assignments.registry
        self._replacements = assignments.replacements
        self._checkpoints = assignments.checkpoints
        self._events = events
        self._standstill = Standstill(config.lease)

    def check(self, now: float) -> RunFailure | None:
        """Finds lost workers; the first reason to end the run, if there is one."""
        found = [self.lose(loss, now) for loss in self._registry.losses(now)]
        return next(filter(None, found), None) or self._check_standstill(now)

    def check_empty_places(self, now: float) -> RunFailure | None:
        """Why the run ends, if a place has been empty for too long."""
        overdue = next(iter(self._replacements.overdue(self._registry.missing, now)), None)
        if overdue is None:
            return None
        waited = f"no replacement joined within {now - overdue.awaited:.0f} s for {self._label(overdue.index)}"
        return RunFailure(f"{waited}: {self.diagnose(now, overdue.index).text}", ExitCode.NO_WORKER)

    def lose(self, loss: WorkerLoss, now: float) -> RunFailure | None:
        """Before the run starts, a lost worker with unknown exit status only frees its place."""
        member = loss.member
        if not self._registry.begun and loss.status is None:
            self._registry.free(member)
            self._events.info(f"{member.label} is free again: {member.process} {loss.why}")
            return None
        why = failure_report(loss, self._ledger, now)
        if not self._may_replace(member.index, loss.status):
            reason = self._with_waiters(why, now) + self._times_replaced(member)
            member.status = MemberStatus.LOST
            return RunFailure(reason, _code(loss.status))
        self._assignments.vacate(loss, why, now)
        self._events.info(f"{why}. Its replacement begins at step {self._checkpoints.complete}")
        return None

    def note_exit(self, exited: Exited, now: float) -> RunFailure | None:
        """A process ended. Its worker is lost once its last messages have had time to arrive."""
        member = self._registry.members.get(exited.index)
        if member is None and exited.index in self._registry.missing:
            return self._note_failed_start(exited)
        if member is not None and member.pid == exited.pid and member.reachable:
            member.exited = now, exited.status
        return None

    def diagnose(self, now: float, worker: int | None = None) -> Diagnosis:
        """Why the run waits, or why `worker` does."""
        config, pending = self._config, self._replacements.pending
        cluster = ClusterState(config.schedule, self._registry.members, pending, self._ledger, now)
        return diagnose(cluster, Prospect(config.lease, config.patience, config.restarts > 0), worker)

    def _note_failed_start(self, exited: Exited) -> RunFailure | None:
        """A process ended that was to take an empty place; unless it is the one whose loss has emptied it."""
        pending = self._replacements.pending.get(exited.index)
        if pending is not None and pending.pid == exited.pid:
            return None
        what = f"{self._label(exited.index)} {describe_exit(exited.status)} before it joined; see its own output"
        if not self._may_replace(exited.index, exited.status):
            return RunFailure(what, _code(exited.status))
        self._assignments.count_failed_start(exited.index)
        self._events.info(what)
        return None

    def _may_replace(self, index: int, status: int | None) -> bool:
        return status not in _DELIBERATE and self._replacements.permits(index)

    def _check_standstill(self, now: float) -> RunFailure | None:
        """All workers wait for each other: nothing will change that."""
        members = self._registry.reachable()
        lasts = self._standstill.lasts(members, now)
        if lasts < self._standstill.bound or not self._registry.complete:
            return None
        places = ", ".join(f"worker {member.index} at {member.endpoint} on host {member.host}" for member in members)
        return RunFailure(
            f"every worker has been waiting for another for {lasts:.0f} s: {self.diagnose(now).text}. "
            f"Can they reach each other's queues? They are: {places}. See queues.url",
            ExitCode.FAILED,
        )

    def _with_waiters(self, why: str, now: float) -> str:
        """Why a worker is lost, and which others waited for it."""
        found = self.diagnose(now)
        if found.chain.harmless or not found.chain.edges:
            return why
        return f"{why}. {found.text[0].upper()}{found.text[1:]}"

    def _times_replaced(self, member: Member) -> str:
        times = self._replacements.in_a_row(member.index)
        if not times:
            return ""
        step, most = self._checkpoints.complete, self._config.restarts
        return f". It was replaced {times} times since checkpoint {step} (recovery.restarts is {most})"

    def _label(self, index: int) -> str:
        return worker_label(index, self._registry.placement[index])


def _code(status: int | None) -> int:
    return status if status in _PASSED_ON else ExitCode.FAILED
