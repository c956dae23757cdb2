"""Place of the script: the run goes on for a lease if its script is gone.

    lost ──> its place is empty ──(another process takes it)──> the run goes on
    Goodbye        │
       │           └──(a lease has passed)──┐
       └────────────────────────────────────┴──> the run stops with its newest complete checkpoint

The workers carry out what the script has called for, and save the state after that. The script is the user's program,
which nothing here starts again: its losses do not count in `recovery.restarts`. Without snapshots no other process
could go on where it was, and the run stops at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stageline.broker.control.messages import Exited, Failed, Goodbye, Hello, StopRun
from stageline.broker.ledger.explain import failure_report
from stageline.broker.ledger.losses import Replacement, WorkerLoss
from stageline.broker.ledger.member import SCRIPT, Member

from . import records
from .place import MemberPlace
from .shutdown import stop
from .state import RunState


@dataclass(frozen=True, slots=True)
class ScriptPlace(MemberPlace):
    """Place of the script in a run."""

    @property
    def owner(self) -> str:
        """The script for people."""
        return SCRIPT

    def awaited(self, silent: Sequence[Member], hello: Hello, waited: float) -> list[Member]:
        """Return the script before this one: another may come from any host, and wait until that one is lost."""
        return [*silent]

    def may_be_restarted(self, predecessor: Member | None) -> bool:
        """Return False: the script is not restarted, and while there is one, which may run for days, none stands by."""
        return False

    def stay_empty(self, pending: Replacement, now: float) -> None:
        """Stop the run if the place has been empty for a lease."""
        if now - pending.awaited >= self.run.config.lease:
            self._stop(pending.why, now)

    def take_leave(self, member: Member, message: Failed | Goodbye, now: float) -> None:
        """Note that the script makes no more calls; it may stay until the workers have carried out the last."""
        if isinstance(message, Goodbye):
            self.run.stopping.note_calls(message.training_steps, present=True)
            member.leave()
            self._stop(f"{member.label} left: {message.reason}", now)
        else:
            MemberPlace.take_leave(self, member, message, now)

    def lose(self, loss: WorkerLoss, now: float) -> str:
        """Empty the place, and stop the run if no other process could go on. Return "": the run survives the loss."""
        run, member, why = self.run, loss.member, failure_report(loss, self.run.ledger, now)
        run.registry.free(member)
        if not run.config.restarts:
            self._stop(why, now)
            return ""
        run.replacements.pending[member.index] = Replacement(member.index, now, why, member.pid, now, host=member.host)
        records.save(run)
        run.events.infos.append(
            f"{why}. The run stops in {run.config.lease:g} s unless another process takes its place"
        )
        return ""

    def _note_failed_start(self, pending: Replacement | None, exited: Exited, now: float) -> None:
        if pending is None:
            self._stop("the script has ended before it joined; see its own output", now)

    def _stop(self, reason: str, now: float) -> None:
        """Stop the run, unless a stop was requested before: its workers may have to finish a step first."""
        if self.run.stopping.request is None and not self.run.lifecycle.over:
            stop(self.run, StopRun(reason, at_step_end=self.run.config.snapshots), now)


def place_of(run: RunState, index: int | None) -> MemberPlace:
    """Return place `index` of the run; None stands for the place of any worker."""
    script = run.config.script
    return (
        MemberPlace(run, -1 if index is None else index)
        if script is None or index != script
        else ScriptPlace(run, script)
    )
