"""The end of a run: on request, with which exit code and reason and after which step; or finished.

All stages have to stop after the same step, or their last snapshots make no checkpoint. The broker chooses it: late
enough that no stage has passed it when the message arrives, and otherwise as early as possible. In a scripted run it is
the last step that the script has called for, if that has begun a moment later: the script is asked, and makes no more
calls from then on.

A run has finished once every worker says so and the ledger says the same:

    Finished ──(all steps of the worker's stages are in the ledger)──> finished ──(all workers are)──> the run is over
         └──(some are not)──> nothing; said once if that stays so: its worker repeats Finished until the run is over

A worker sends Finished after the broker has confirmed all its steps. So one that comes earlier is not the worker's.
"""

from collections import deque
from math import ceil

import msgspec

from stageline.broker.control.messages import Finished, Stop, StopRun
from stageline.broker.ledger.member import Member, MemberStatus
from stageline.pipeline.digest import differing_copies, weights_sha256
from stageline.pipeline.errors import ExitCode

from .lifecycle import RunEvent, RunState
from .records import RunRecords
from .run import RunOutcome, RunPhase

DELAY = 1.0  # seconds at most from a stage's start of a step until the broker's decision on that news arrives there
MOTION = 0.3  # seconds that steps must have been observed for to know their pace
_LEAST = 0.1  # seconds between two reports


class Shutdown:
    """A request to stop the run, and what follows from it. Times are seconds since the epoch."""

    def __init__(self, run: RunRecords) -> None:
        self.request: StopRun | None = None
        self.called_for: int | None = None  # all training steps of a script that makes no more calls
        self._run = run
        self._deadline = 0.0  # when it is decided, whatever is known
        self._begun = 0  # the first step that no stage had begun when it came
        self._decided = False  # the request has ended the run
        self._pace = _Pace()

    def note_progress(self, now: float) -> None:
        if self._run.lifecycle.state in (RunState.RUNNING, RunState.STOPPING):
            self._pace.note(self._run.ledger.begun, now)

    def stop(self, request: StopRun, now: float) -> None:
        """Stops the run: the newest request counts, from the time of the first.

        After its end: dismisses the broker, and workers no longer finish the step.
        """
        outcome = self._run.outcome
        if request.over and outcome is None:
            self._run.events.count("too early", "the run has not ended, and its broker was told that it is over")
            return
        self._run.lifecycle.move(RunEvent.STOP_REQUESTED)
        if outcome is None:
            if self.request is None:
                self._deadline, self._begun = now + DELAY, self._run.ledger.begun
                self._ask_script(request)
            self.request = request
            self.stop_if_due(now)
        else:
            if not request.at_step_end:
                outcome = self._run.outcome = msgspec.structs.replace(outcome, at_step_end=False, step=None)
            self._run.stop_workers(outcome)

    def stop_if_due(self, now: float) -> None:
        """Not before it is known after which step all can stop."""
        request = self.request
        if request is None or self._run.lifecycle.over:
            return
        waits = self._may_save(request) and self._run.registry.begun and now < self._deadline
        if waits and not self._knows_last_step(now):
            return
        saves = self._saves(request)
        last_step = self._last_step(now) if saves else None
        self._decided = True
        reason, code = self._reason(request)
        outcome = RunOutcome(RunPhase.FAILED, reason, code, at_step_end=saves, step=last_step)
        self._run.end(RunEvent.STOP_DUE, outcome)

    def update_outcome(self, outcome: RunOutcome) -> None:
        """Workers of a stopped run may have completed a newer checkpoint."""
        if self.request is None or not self._decided:
            return
        reason, code = self._reason(self.request)
        updated = msgspec.structs.replace(outcome, reason=reason, code=code)
        if updated != outcome:
            self._run.set_outcome(updated)

    def _may_save(self, request: StopRun) -> bool:
        return self._run.config.snapshots and request.at_step_end

    def _saves(self, request: StopRun) -> bool:
        """If the workers are on other machines, the script alone knows which calls come before the state that they
        would save; it has that on its disk when it says that it makes no more."""
        known = self._run.config.code is None or self.called_for is not None
        return known and self._may_save(request)

    def _ask_script(self, request: StopRun) -> None:
        """What it has called for; also while it computes, it answers within a beat."""
        script = self._script
        if script is not None and self._may_save(request):
            self._run.outgoing.append((script.sender, Stop(request.reason, ExitCode.SAVED, at_step_end=True)))

    @property
    def _script(self) -> Member | None:
        """The script, if it is there, and all workers are."""
        config, registry = self._run.config, self._run.registry
        script = registry.members.get(config.script) if config.script is not None else None
        return script if script is not None and script.reachable and registry.begun else None

    def _knows_last_step(self, now: float) -> bool:
        if self.called_for is not None:  # of which two may be on their way, and may take long
            return self._run.ledger.begun >= self.called_for
        return self._script is None and self._pace.is_known(now)

    def _last_step(self, now: float) -> int:
        begun = self._run.ledger.begun
        if self.called_for is None:
            return self._pace.last_step(begun, self._run.training_steps, now)
        # If none has begun since the request, a step takes longer than that.
        return self.called_for if begun > self._begun else min(begun, self.called_for)

    def _reason(self, request: StopRun) -> tuple[str, int]:
        checkpoint = self._run.checkpoints.complete
        if not self._run.config.snapshots:
            return request.reason, ExitCode.INTERRUPTED
        if not checkpoint:
            return f"{request.reason}; nothing is saved yet", ExitCode.INTERRUPTED
        return f"{request.reason}; the state after {checkpoint} steps is saved", ExitCode.SAVED


class _Pace:
    """How many steps the run begins in the time that a decision takes to reach every worker."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # when, and the first step that no stage had begun

    def note(self, begun: int, now: float) -> None:
        self._seen.append((now, begun))
        while len(self._seen) > 1 and self._seen[1][0] <= now - DELAY:
            self._seen.popleft()

    def is_known(self, now: float) -> bool:
        """Whether the run was observed for long enough to know its pace, or that it is slow."""
        return bool(self._seen) and (now - self._seen[0][0] >= DELAY or self._moving(now) >= MOTION)

    def last_step(self, begun: int, training_steps: int | None, now: float) -> int:
        """The number of steps after which every stage can stop."""
        lately = max(0, begun - self._seen[0][1]) if self._seen else 0
        # One or two steps do not tell how long each took, only that they may be long.
        ahead = lately if lately <= 2 else ceil(lately / max(_LEAST, self._moving(now)) * DELAY)
        return begun + ahead if training_steps is None else min(begun + ahead, training_steps)

    def _moving(self, now: float) -> float:
        """For how many of the seconds observed the run has made progress."""
        first = self._seen[0][1]
        return now - max(at for at, begun in self._seen if begun == first)


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
