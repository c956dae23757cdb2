"""Ends the run as finished, once every worker says so and the ledger says the same.

    Finished ──(all steps of the worker's stages are in the ledger)──> finished ──(all workers are)──> the run is over
         └──(some are not)──> nothing; said once if that stays so: its worker repeats Finished until the run is over

A worker sends Finished after the broker has confirmed all its steps. So one that comes earlier is not the worker's.
"""

from stageline.broker.control.messages import Finished
from stageline.broker.ledger.member import Member, MemberStatus
from stageline.pipeline.digest import differing_copies, weights_sha256
from stageline.pipeline.errors import ExitCode

from .records import RunRecords
from .run import RunOutcome, RunPhase
from .shutdown import Shutdown

# Seconds until what supports an end may have come: from a replacement of the last stage's worker, which tells where a
# run ended early, or from the script, whose thread may have to wait for the user's code
GRACE = 5.0


class Finishing:
    """The ends of a run's workers, as they tell them. Times are seconds since the epoch."""

    def __init__(self, run: RunRecords, shutdown: Shutdown) -> None:
        self._run = run
        self._shutdown = shutdown
        self._refused: dict[int, float] = {}  # since when, by incarnation; infinite once it is said

    def note(self, member: Member, finished: Finished, now: float) -> RunOutcome | None:
        """Note that `member` has finished. Return the outcome of the run if it was the last one, else None."""
        if self._lacking(member):
            self._refused.setdefault(member.incarnation, now)
            return None
        self._refused.pop(member.incarnation, None)
        member.status = MemberStatus.FINISHED
        member.digests, member.copies = finished.digests, finished.copies
        parts = [each.digests for each in self._run.registry.members.values() if each.digests is not None]
        return self._outcome() if len(parts) == len(self._run.config.schedule.placement) else None

    def check(self, now: float) -> None:
        """Log the workers that have said for `GRACE` seconds that they have finished, and whose steps are not there."""
        for incarnation, since in list(self._refused.items()):
            member = self._run.registry.current(incarnation)
            if member is None:
                del self._refused[incarnation]
                continue
            lacking = self._lacking(member)
            if lacking and now - since >= GRACE:
                self._refused[incarnation] = float("inf")
                self._run.events.count_once("unsupported", f"refused: {member.label} has not finished: {lacking}")

    def _lacking(self, member: Member) -> str:
        """Return why the end of `member` is not supported by the ledger. Returns "" if it is.

        A script whose place is empty may be followed by another, which calls for more: the run waits for that one, or
        stops after a lease.
        """
        config, finished = self._run.config, self._run.ledger.finished
        script = self._run.registry.members.get(config.script) if config.script is not None else None
        called = self._shutdown.called_for
        if config.scripted and called is None and (script is None or script.reachable):
            return "the script has not said that it makes no more calls"
        total = (called or 0) if config.scripted else self._run.steps_to_train
        behind = [stage for stage in member.stages if finished[stage] < total]
        return ", ".join(f"stage {config.schedule.label(s)} has trained {finished[s]} of {total} steps" for s in behind)

    def _outcome(self) -> RunOutcome:
        """Return the end of the run, with the digest of the weights that all workers have together."""
        members = self._run.registry.members.values()
        parts = [each.digests for each in members if each.digests is not None]
        if why := differing_copies(parts, {name: first for each in members for name, first in each.copies.items()}):
            return RunOutcome(RunPhase.FAILED, why, ExitCode.FAILED)
        digest = weights_sha256({name: digest for part in parts for name, digest in part.items()})
        early = self._run.early_end
        reason = "all steps are done" if early is None else early.reason
        return RunOutcome(RunPhase.FINISHED, reason, ExitCode.OK, digest, early=early is not None)
