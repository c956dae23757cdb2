"""Decides what becomes of a scripted run whose script is gone.

    lost ──> its place is empty ──(another process takes it)──> the run goes on
    Goodbye        │
       │           └──(a lease has passed)──┐
       └────────────────────────────────────┴──> the run stops with its newest complete checkpoint

The workers carry out what it has called for, and save the state after that. The script is the user's program, which
nothing here starts again: its losses do not count in `recovery.restarts`. Without snapshots no other process could go
on where it was, and the run stops at once.
"""

from stageline.broker.control.messages import Exited, Goodbye, StopRun
from stageline.broker.diagnosis.explain import failure_report
from stageline.broker.ledger.member import Member, WorkerLoss
from stageline.broker.ledger.registry import Replacement

from .records import RunRecords
from .shutdown import Shutdown


class ScriptPlace:
    """The script's place in one run. Times are seconds since the epoch."""

    def __init__(self, run: RunRecords, shutdown: Shutdown) -> None:
        self._run = run
        self._shutdown = shutdown

    def lose(self, loss: WorkerLoss, now: float) -> None:
        """Empties its place."""
        member, why = loss.member, failure_report(loss, self._run.ledger, now)
        self._run.registry.free(member)
        if not self._run.config.restarts:
            self._stop(why, now)
            return
        gap = Replacement(member.index, now, why, member.pid, now, host=member.host)
        self._run.replacements.pending[member.index] = gap
        self._run.save()
        lease = self._run.config.lease
        self._run.events.infos.append(f"{why}. The run stops in {lease:g} s unless another process takes its place")

    def leave(self, member: Member, goodbye: Goodbye, now: float) -> None:
        """It says that it will make no more calls."""
        self._shutdown.called_for = goodbye.training_steps
        self._stop(f"{member.label} left: {goodbye.reason}", now)

    def note_failed_start(self, exited: Exited, now: float) -> None:
        """The process that was to become the script has ended."""
        if exited.index not in self._run.replacements.pending:
            self._stop("the script has ended before it joined; see its own output", now)

    def check_empty(self, pending: Replacement, now: float) -> None:
        """Stops the run if the place has been empty for a lease."""
        if now - pending.awaited >= self._run.config.lease:
            self._stop(pending.why, now)

    def _stop(self, reason: str, now: float) -> None:
        """Not if a stop was requested before: its workers may have to finish a step first."""
        if self._shutdown.request is None and not self._run.lifecycle.over:
            self._shutdown.stop(StopRun(reason, at_step_end=self._run.config.snapshots), now)
