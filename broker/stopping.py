"""How a run ends that somebody stops: with which exit code and words, and after which step.

All stages have to stop after the same step, or their last snapshots make no checkpoint. The broker names it: one that
no stage has passed by the time it hears of it, and none later than it must be.
"""

from collections import deque

from .control import StopRun
from .run import Outcome, Phase

SAVED, NOTHING_SAVED = 75, 130  # exit codes
_DELAY = 1.0  # seconds that pass at most between a stage's beginning of a step and its hearing of the broker's decision
_INTERRUPTIONS = frozenset({SAVED, NOTHING_SAVED})


class Pace:
    """How many steps the run begins in the time that a decision takes to reach everyone."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # when, and the first step that no stage had begun

    def note(self, begun: int, now: float) -> None:
        """The run has begun all steps before `begun`."""
        self._seen.append((now, begun))
        while len(self._seen) > 1 and self._seen[1][0] <= now - _DELAY:
            self._seen.popleft()

    def end(self, begun: int, training_steps: int | None) -> int:
        """The number of steps after which every stage can stop."""
        lately = begun - self._seen[0][1] if self._seen else 0
        end = begun + max(0, lately)
        return end if training_steps is None else min(end, training_steps)


def outcome_of(stop: StopRun, end: int, checkpoint: int | None) -> Outcome:
    """The outcome of a run that is stopped, with `checkpoint` complete by now; None where there are no snapshots."""
    reason, code = stop.reason, stop.code
    if checkpoint is not None and code in _INTERRUPTIONS:
        code = SAVED if checkpoint else NOTHING_SAVED
        saved = f"the state after {checkpoint} steps is saved" if checkpoint else "nothing is saved yet"
        reason = f"{reason}; {saved}"
    step = end if stop.at_step_end and checkpoint is not None else None
    return Outcome(Phase.FAILED, reason, code, at_step_end=stop.at_step_end, step=step)
