"""Place of a worker: what follows from the loss of its owner, and from staying empty.

lost ──(may be replaced)──────────> its place is empty ──(no replacement in time)──> the run ends
  └──(replaced too often already, or it would fail again)──────────────────────────────^
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stageline.broker.control.messages import Exited, Failed, Goodbye, Hello
from stageline.broker.ledger.explain import failure_report, how_lost
from stageline.broker.ledger.losses import Replacement, WorkerLoss
from stageline.broker.ledger.member import Member, describe_exit, worker_label
from stageline.pipeline.errors import ExitCode

from . import records
from .state import RunState
from .waiting import why_waiting

UNDECIDED = 3.0  # seconds that a newcomer stands by at most until those that load their models are heard again

# Results of a process that would fail again if it were restarted, and those that are the run's exit code too.
_DELIBERATE = frozenset({ExitCode.USAGE, ExitCode.REFUSED})
_PASSED_ON = frozenset({ExitCode.USAGE, ExitCode.SAVED, ExitCode.REFUSED, ExitCode.INTERRUPTED})


@dataclass(frozen=True, slots=True)
class MemberPlace:
    """Place of a worker in a run.

    Attributes:
        run: The state.
        index: Index of the place in the plan.
    """

    run: RunState
    index: int

    @property
    def owner(self) -> str:
        """The owner of the place for people."""
        return "its worker"

    @property
    def label(self) -> str:
        """The place with its stages for people: "worker 1 (stages 0 and 2)"."""
        return worker_label(self.index, self.run.config.labels[self.index])

    def awaited(self, silent: Sequence[Member], hello: Hello, waited: float) -> list[Member]:
        """Return the owners for whose end a newcomer waits.

        Args:
            silent: Owners of places that the newcomer could have, which it has not heard since it came.
            hello: The newcomer's Hello.
            waited: Seconds since the newcomer came.
        """
        here = [owner for owner in silent if owner.host == hello.host]
        return [owner for owner in here if owner.introduced or waited < UNDECIDED]

    def may_be_restarted(self, predecessor: Member | None) -> bool:
        """Return True if a process that claims the place may be its owner `predecessor`, restarted."""
        return predecessor is not None

    def stay_empty(self, pending: Replacement, now: float) -> None:
        """End the run if the place has been empty for too long."""
        run, empty = self.run, now - pending.awaited
        if empty >= run.config.patience:
            why = why_waiting(run, now, self.index).text
            run.fail(f"no replacement joined within {empty:.0f} s for {self.label}: {why}", ExitCode.NO_WORKER)

    def take_leave(self, member: Member, message: Failed | Goodbye, now: float) -> None:
        """Note a last message of the place's owner `member`, which then sends nothing else and ends soon.

        Args:
            member: The owner.
            message: Its last message.
            now: Seconds since the epoch.
        """
        if self.run.lifecycle.over:
            member.leave()
        else:
            member.part(message, now)

    def lose(self, loss: WorkerLoss, now: float) -> str:
        """Empty the place of a lost worker. Return why the run cannot survive the loss, "" if it can.

        Before the run starts, a lost worker only frees its place, unless its exit is known.
        """
        run, member = self.run, loss.member
        if not (run.registry.begun or loss.exited):
            run.registry.free(member)
            run.events.infos.append(f"{member.label} is free again: {member.process} {loss.why}")
            return ""
        why, left = failure_report(loss, run.ledger, now), member.leaving is not None
        if not (left or self._may_be_replaced(loss.result)):
            found = why_waiting(run, now)
            if found.chain.edges and not found.chain.harmless:
                why += f". {found.text[0].upper()}{found.text[1:]}"
            member.lose()
            return why + self._times_replaced
        run.registry.free(member)
        run.replacements.count(member.index, failed=not left)
        run.replacements.pending[member.index] = Replacement(
            member.index, now, why, member.pid, now, how_lost(loss), member.host, left
        )
        run.checkpoints.lose_copies(member.index)
        records.go_back(run, [member], member.stages, loss.why, now)
        run.events.infos.append(f"{why}. Its replacement begins at step {run.checkpoints.complete}")
        return ""

    def note_end(self, exited: Exited, now: float) -> None:
        """Note the end of a process that was to take the empty place, or of the process whose loss has emptied it."""
        run, pending = self.run, self.run.replacements.pending.get(self.index)
        if pending is None or pending.pid != exited.pid:
            self._note_failed_start(pending, exited, now)
        elif run.replacements.explain(self.index, exited.detail):
            run.events.infos.append(f"{self.label}, which was lost, was {exited.detail}")

    def _note_failed_start(self, pending: Replacement | None, exited: Exited, now: float) -> None:
        run, comma = self.run, "," if exited.detail else ""
        what = f"{self.label} {describe_exit(exited)}{comma} before it joined; see its own output"
        if self._may_be_replaced(exited.result):
            run.replacements.count(self.index)
            records.save(run)
            run.events.infos.append(what)
        else:
            run.fail(f"{what}{self._times_replaced}", exit_code(exited.result))

    def _may_be_replaced(self, result: int | None) -> bool:
        run = self.run
        return result not in _DELIBERATE and run.replacements.in_a_row[self.index] < run.config.restarts

    @property
    def _times_replaced(self) -> str:
        run = self.run
        times, most, since = run.replacements.in_a_row[self.index], run.config.restarts, run.checkpoints.complete
        return (
            f". It was replaced {times} times since checkpoint {since} (recovery.restarts is {most})" if times else ""
        )


def exit_code(result: int | None) -> int:
    """Return the exit code of a run that ends since one of its processes has returned `result`."""
    return result if result in _PASSED_ON else ExitCode.FAILED
