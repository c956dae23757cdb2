"""How a run ends that somebody stops: with which exit code and words, and after which step.

All stages have to stop after the same step, or their last snapshots make no checkpoint. The broker names it: one that
no stage has passed by the time it hears of it, and none later than it must be.
"""

from collections import deque
from math import ceil

import msgspec

from stageline.broker.control.protocol import StopRun
from stageline.pipeline.exit_code import ExitCode

from .run import RunOutcome, RunPhase

DELAY = 1.0  # seconds at most from a stage's beginning of a step to its hearing of what the broker decided on that news
MOTION = 0.3  # seconds that a run must have gone on for its pace to be known
_LEAST = 0.1  # seconds between two reports
_INTERRUPTIONS = frozenset({ExitCode.SAVED, ExitCode.INTERRUPTED})


class Shutdown:
    """Somebody's wish to stop the run, and what becomes of it. Times are seconds since the epoch.

    `snapshots`: whether the stages write any; without, there is no step to finish.
    """

    def __init__(self, *, snapshots: bool) -> None:
        self.wish: StopRun | None = None
        self._snapshots = snapshots
        self._latest = 0.0  # when it is decided, whatever is known
        self._pace = _Pace()

    def note(self, begun: int, now: float) -> None:
        """The run is running, and has begun all steps before `begun`."""
        self._pace.note(begun, now)

    def ask(self, wish: StopRun, now: float) -> None:
        """Somebody wants the run to stop; the last wish counts, the first one's time."""
        if self.wish is None:
            self._latest = now + DELAY
        self.wish = wish

    def is_due(self, now: float, *, running: bool) -> bool:
        """Whether to stop now: not before it is known after which step all can."""
        if self.wish is None:
            return False
        waits = self._snapshots and self.wish.at_step_end and running
        return not waits or now >= self._latest or self._pace.is_known(now)

    def outcome(self, checkpoint: int, begun: int, training_steps: int | None, now: float) -> RunOutcome | None:
        """How the run ends, with `checkpoint` complete by now; None if nobody wants it to."""
        if self.wish is None:
            return None
        reason, code = self._words(self.wish, checkpoint)
        at_step_end = self.wish.at_step_end
        end = self._pace.end(begun, training_steps, now) if at_step_end and self._snapshots else None
        return RunOutcome(RunPhase.FAILED, reason, code, at_step_end=at_step_end, step=end)

    def better(self, outcome: RunOutcome, checkpoint: int) -> RunOutcome:
        """The outcome of a run that was stopped, once workers have left a newer `checkpoint`."""
        if self.wish is None:
            return outcome
        reason, code = self._words(self.wish, checkpoint)
        return msgspec.structs.replace(outcome, reason=reason, code=code)

    def _words(self, wish: StopRun, checkpoint: int) -> tuple[str, int]:
        if not self._snapshots or wish.code not in _INTERRUPTIONS:
            return wish.reason, wish.code
        if not checkpoint:
            return f"{wish.reason}; nothing is saved yet", ExitCode.INTERRUPTED
        return f"{wish.reason}; the state after {checkpoint} steps is saved", ExitCode.SAVED


class _Pace:
    """How many steps the run begins in the time that a decision takes to reach everyone."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # when, and the first step that no stage had begun

    def note(self, begun: int, now: float) -> None:
        self._seen.append((now, begun))
        while len(self._seen) > 1 and self._seen[1][0] <= now - DELAY:
            self._seen.popleft()

    def is_known(self, now: float) -> bool:
        """Whether the run was watched for long enough to say how fast it is, or that it is slow."""
        return bool(self._seen) and (now - self._seen[0][0] >= DELAY or self._moving(now) >= MOTION)

    def end(self, begun: int, training_steps: int | None, now: float) -> int:
        """The number of steps after which every stage can stop."""
        lately = max(0, begun - self._seen[0][1]) if self._seen else 0
        # Of one step or two it cannot be told how long they took, only that they may be long.
        ahead = lately if lately <= 2 else ceil(lately / max(_LEAST, self._moving(now)) * DELAY)
        return begun + ahead if training_steps is None else min(begun + ahead, training_steps)

    def _moving(self, now: float) -> float:
        """For how many seconds, of those watched, the run has gone on."""
        first = self._seen[0][1]
        return now - max(at for at, begun in self._seen if begun == first)
