"""Counters of a run, for monitoring.

They count since the broker began: steps with their times, what stages waited for, messages, and recoveries.
Nothing here is kept: a broker that is started again counts from 0. Counters never become less, as a monitoring system
needs it. A queue's positions do, when a replacement begins again at its checkpoint: here, a message that is put again
counts again.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from stageline.broker.control.messages import Report

from .member import Flowing, Member
from .times import StepTotals, WaitCause

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_WAITS = {cause: name for cause in WaitCause if (name := cause.name.lower()) in StepTotals._fields}


class Histogram:
    """Seconds by size: how many lie within each of `BOUNDS`, and their sum."""

    def __init__(self) -> None:
        """Start without any."""
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count a time; a negative one, of a clock that was set back, counts as 0."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += max(0.0, seconds)


@dataclass(slots=True)
class StageCounters:
    """Steps that a stage has computed, repeated ones included, its seconds of computation, and those of its waits."""

    steps: int = 0
    computed: float = 0.0
    waited: dict[WaitCause, float] = field(default_factory=lambda: dict.fromkeys(WaitCause, 0.0))
    ended: float | None = None  # its newest step, in seconds since the epoch

    def add(self, sums: StepTotals) -> float:
        """Count a step; return the seconds from the end of the one before to its end, or from its own start."""
        took = sums.end - (sums.start if self.ended is None else self.ended)
        self.steps += 1
        self.computed += max(0.0, sums.busy)
        for cause, name in _WAITS.items():
            self.waited[cause] += max(0.0, getattr(sums, name))
        self.ended = sums.end
        return took


class RunCounters:
    """Counters of a run.

    Attributes:
        steps: Steps that every stage has finished, each counted when it was finished for the first time.
        step_seconds: Times between the ends of two steps at the last stage.
        stages: Counters of each stage, or copy of a stage with replicas.
        recoveries: Losses of workers after which the place was at work again.
        recovering: Seconds that this took, in all.
        began: When the first report came, in seconds since the epoch; None before.
    """

    def __init__(self) -> None:
        """Start at 0."""
        self.steps = 0
        self.step_seconds = Histogram()
        self.stages: dict[int, StageCounters] = defaultdict(StageCounters)
        self.recoveries = 0
        self.recovering = 0.0
        self.began: float | None = None
        self._moved: float | None = None  # when the newest step was finished
        self._floor: int | None = None  # steps that every stage had finished, at most
        self._positions: dict[tuple[str, Flowing], tuple[tuple[str, int], int]] = {}  # process, position
        self._passed: dict[tuple[str, Flowing], int] = defaultdict(int)

    def heard(self, now: float) -> None:
        """Note that a worker has reported at `now`, in seconds since the epoch."""
        if self.began is None:
            self.began = now

    def reached(self, before: int, floor: int, now: float) -> None:
        """Note that the steps before `floor` are finished.

        Args:
            before: What `floor` was until now.
            floor: Steps that every stage has finished.
            now: Seconds since the epoch.
        """
        known = before if self._floor is None else self._floor
        self.steps += max(0, floor - known)
        self._floor = max(floor, known)
        if floor != before:
            self._moved = now

    def stalled(self, now: float) -> float | None:
        """Return the seconds since a step was finished or, before the first, since the first report; else None.

        `now` is in seconds since the epoch.
        """
        since = self.began if self._moved is None else self._moved
        return None if since is None else max(0.0, now - since)

    def note_steps(self, found: Iterable[tuple[int, StepTotals]], last: int) -> None:
        """Count steps, each with the stage that has finished it; the stage `last` tells how long a step takes."""
        for stage, sums in found:
            took = self.stages[stage].add(sums)
            if stage == last:
                self.step_seconds.add(took)

    def note_queues(self, member: Member, report: Report) -> None:
        """Count the messages that a report's positions tell of.

        A process that begins at a checkpoint, and one that begins again, counts from its first position on.
        """
        for name, depth in report.puts.items():
            self._note(member, (name, Flowing.PUT), depth.put)
        for name, intake in report.takes.items():
            self._note(member, (name, Flowing.TAKEN), intake.taken)

    def passed(self, name: str, way: Flowing) -> int | None:
        """Return how many messages have passed an end of the queue `name`; None if none of its processes has told."""
        return self._passed.get((name, way))

    def recovered(self, seconds: float) -> None:
        """Note that a lost worker's place is at work again, `seconds` after the loss was noticed."""
        self.recoveries += 1
        self.recovering += max(0.0, seconds)

    def _note(self, member: Member, end: tuple[str, Flowing], position: int) -> None:
        process = member.host, member.pid
        first = 0 if member.generation == 1 and not member.start else position
        known, before = self._positions.get(end, (process, first))
        self._passed[end] += max(0, position - (before if known == process else position))
        self._positions[end] = process, position
