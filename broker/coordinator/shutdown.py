"""How a run ends that is stopped on request: with which exit code and reason, and after which step.

All stages have to stop after the same step, or their last snapshots make no checkpoint. The broker chooses it: late
enough that no stage has passed it when the message arrives, and otherwise as early as possible.
"""

from collections import deque
from math import ceil

import msgspec

from stageline.broker.control.protocol import StopRun
from stageline.pipeline.errors import ExitCode

from .run import RunOutcome, RunPhase

DELAY = 1.0  # seconds at most from a stage's start of a step until the broker's decision on that news arrives there
MOTION = 0.3  # seconds that steps must have been observed for to know their pace
_LEAST = 0.1  # seconds between two reports
_INTERRUPTIONS = frozenset({ExitCode.SAVED, ExitCode.INTERRUPTED})


class Shutdown:
    """A request to stop the run, and what follows from it. Times are seconds since the epoch.

    `snapshots`: whether the stages write any; without, there is no step to finish.
    """

    def __init__(self, *, snapshots: bool) -> None:
        self.request: StopRun | None = None
        self._snapshots = snapshots
        self._deadline = 0.0  # when it is decided, whatever is known
        self._decided = False  # the request has ended the run
        self._pace = _Pace()

    def note_progress(self, begun: int, now: float) -> None:
        """The run is running, and has begun all steps before `begun`."""
        self._pace.note(begun, now)

    def ask(self, request: StopRun, now: float) -> None:
        """The newest request counts, from the time of the first."""
        if self.request is None:
            self._deadline = now + DELAY
        self.request = request

    def is_due(self, now: float, *, running: bool) -> bool:
        """Whether to stop now: not before it is known after which step all can."""
        if self.request is None:
            return False
        waits = self._snapshots and self.request.at_step_end and running
        return not waits or now >= self._deadline or self._pace.is_known(now)

    def end(self, checkpoint: int, begun: int, training_steps: int | None, now: float) -> RunOutcome | None:
        """How the run ends, with `checkpoint` complete by now; None without a request."""
        if self.request is None:
            return None
        self._decided = True
        reason, code = self._reason(self.request, checkpoint)
        at_step_end = self.request.at_step_end
        last = self._pace.last_step(begun, training_steps, now) if at_step_end and self._snapshots else None
        return RunOutcome(RunPhase.FAILED, reason, code, at_step_end=at_step_end, step=last)

    def updated(self, outcome: RunOutcome, checkpoint: int) -> RunOutcome:
        """The outcome of a stopped run, once its workers have completed a newer `checkpoint`."""
        if self.request is None or not self._decided:
            return outcome
        reason, code = self._reason(self.request, checkpoint)
        return msgspec.structs.replace(outcome, reason=reason, code=code)

    def _reason(self, request: StopRun, checkpoint: int) -> tuple[str, int]:
        if not self._snapshots or request.code not in _INTERRUPTIONS:
            return request.reason, request.code
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
