"""Pace of a run: its newest steps, sums of many, and steps per second.

What is kept is bounded: the times of `WINDOW` steps, the sums of `HISTORY`, so that a question needs no look into the
store. A broker that was started again fills the pace from its store, once.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from stageline.broker.control.records import StepRecord
from stageline.broker.ledger.times import StepTotals, WaitCause, totals
from stageline.pipeline.schedule import Schedule

WINDOW = 40  # newest steps whose times are kept whole
MOST_BYTES = 2**25  # of their times, in all
HISTORY = 2000  # newest steps whose sums are kept
MINUTE = 60.0
_WARM = 2  # first steps of what is known, which say nothing about a change
LEAST_SPAN = 5.0  # seconds over which the best pace is measured at least
_FIELDS = {
    WaitCause.DISK: "disk",
    WaitCause.SCRIPT: "script",
    WaitCause.EVALUATION: "evaluation",
    WaitCause.SWITCHING: "switching",
}


class _Reached(NamedTuple):
    """Steps before `floor`, when they were told to be finished, and when the last of them had ended, in seconds."""

    floor: int
    told: float
    ended: float


class RunPace:
    """The newest times of a run's steps.

    Attributes:
        best: Most steps per second over `LEAST_SPAN` seconds or more, of steps that were finished for the first time;
            None before so many have passed.
    """

    def __init__(self) -> None:
        """Start without steps."""
        self.best: float | None = None
        self._records: dict[int, deque[StepRecord]] = defaultdict(deque)
        self._bytes = 0
        self._totals: dict[int, deque[StepTotals]] = defaultdict(lambda: deque(maxlen=HISTORY))
        self._finished: deque[tuple[float, int]] = deque()  # when so many steps were finished
        self._new = deque[_Reached]()  # likewise, without steps that are repeated
        self._highest = 0

    def __bool__(self) -> bool:
        """Return True if any step is known."""
        return bool(self._records)

    def note(self, records: Iterable[StepRecord], ahead: float | None = None) -> list[tuple[int, StepTotals]]:
        """Take finished steps; return their sums, each with its stage, as far as their times are known.

        A step that is repeated after a loss replaces itself and those after it.

        Args:
            records: Finished steps.
            ahead: Seconds by which the broker's clock is ahead of the worker's; None if that is not known.
        """
        sums = []
        for record in records:
            if (found := totals(record)) is None:
                continue
            self._forget(record.stage, record.step)
            self._records[record.stage].append(record)
            self._bytes += len(record.times)
            self._totals[record.stage].append(found._replace(ahead=ahead))
            sums.append((record.stage, found))
            self._trim(record.stage)
        return sums

    def reached(self, floor: int, now: float) -> None:
        """Note that every stage has finished the steps before `floor`, at `now` in seconds since the epoch."""
        self._measure(floor, now)
        finished = self._finished
        if finished and floor <= finished[-1][1]:
            if floor < finished[-1][1]:  # steps are repeated: their pace is measured again
                finished.clear()
            else:
                return
        finished.append((now, floor))
        while len(finished) > 2 and now - finished[0][0] > MINUTE:
            finished.popleft()

    def interrupted(self) -> None:
        """Measure steps per second from here on: a pause is over, and its time is not that of a step."""
        self._finished.clear()
        self._new.clear()

    def rate(self, now: float) -> float | None:
        """Return the steps per second of the last minute before `now`; None before a second step."""
        finished = self._finished
        newest = [each for each in finished if now - each[0] <= MINUTE] or list(finished)[-1:]
        if not newest or len(finished) < 2:
            return None
        earlier = max((each for each in finished if each[0] < newest[0][0]), default=newest[0])
        begin = newest[0] if len(newest) > 1 else earlier
        return (finished[-1][1] - begin[1]) / max(1e-9, now - begin[0])

    def recent(self, since: int = 0) -> list[StepRecord]:
        """Return the records of the newest steps, from step `since` on."""
        return [record for records in self._records.values() for record in records if record.step >= since]

    def history(self, copy: int) -> Sequence[StepTotals]:
        """Return the sums of the newest steps of a copy of a stage, in order."""
        return self._totals.get(copy, ())

    def ended(self, step: int) -> float | None:
        """Return when the last stage ended a step, in seconds since the epoch; None if that is not known.

        The time is by the broker's clock, as far as it is known how far that is ahead of the worker's.
        """
        of = (next((each for each in reversed(sums) if each.step <= step), None) for sums in self._totals.values())
        ends = (each.end + (each.ahead or 0.0) for each in of if each is not None and each.step == step)
        return max(ends, default=None)

    def paused(self, schedule: Schedule, steps: int) -> dict[int, dict[WaitCause, float]]:
        """Return by worker the seconds of a step that it paused for each cause, on average over its newest `steps`.

        The longest pause counts as long as the second longest.
        """
        return {
            worker: {cause: self._mean(copies, name, steps) for cause, name in _FIELDS.items()}
            for worker, copies in enumerate(schedule.placement)
        }

    def idle(self, schedule: Schedule, steps: int = 16, since: int = 0) -> tuple[float, ...]:
        """Return the share of time that each worker does not compute; () if not known.

        Args:
            schedule: Schedule of the run.
            steps: How many of the newest steps count, at most.
            since: First step that counts.
        """
        shares = [self._idle_of(copies, steps, since) for copies in schedule.placement]
        known = [each for each in shares if each is not None]
        return tuple(known) if len(known) == len(shares) else ()

    def _measure(self, floor: int, now: float) -> None:
        """Measure the best pace, by when steps ended and by when that was reported: the longer time counts.

        Reports that come late, all at once, are no fast steps; neither is a clock that was set back.
        """
        new = self._new
        if floor < self._highest:  # steps are repeated, faster than they were: their messages are there
            new.clear()
        elif floor > self._highest:
            self._highest = floor
            ended = self.ended(floor - 1)
            new.append(_Reached(floor, now, now if ended is None else ended))
            while len(new) > 2 and now - new[0].told > MINUTE:
                new.popleft()
            span = max(new[-1].told - new[0].told, new[-1].ended - new[0].ended)
            if span >= LEAST_SPAN:
                self.best = max(self.best or 0.0, (floor - new[0].floor) / span)

    def _idle_of(self, copies: Sequence[int], steps: int, since: int) -> float | None:
        of = [[each for each in self._totals.get(copy, ()) if each.step >= since][-steps - 1 :] for copy in copies]
        if min(map(len, of), default=0) < 2:
            return None
        span = max(each[-1].end for each in of) - max(each[0].end for each in of)
        busy = sum(each.busy for totals in of for each in totals[1:])
        return min(1.0, max(0.0, 1 - busy / span)) if span > 0 else None

    def _mean(self, copies: Sequence[int], name: str, steps: int) -> float:
        """Return the mean seconds of a step in the field `name`, summed over the stages of a worker."""
        totals = [list(self._totals.get(copy, ()))[-steps:] for copy in copies]
        return sum(_usual_mean([getattr(each, name) for each in of]) for of in totals if of)

    def _forget(self, stage: int, step: int) -> None:
        records, sums = self._records[stage], self._totals[stage]
        while records and records[-1].step >= step:
            self._bytes -= len(records.pop().times)
        while sums and sums[-1].step >= step:
            sums.pop()

    def _trim(self, stage: int) -> None:
        records = self._records[stage]
        while len(records) > WINDOW or (self._bytes > MOST_BYTES and len(records) > 2):
            self._bytes -= len(records.popleft().times)


def _usual_mean(values: Sequence[float]) -> float:
    """Return the mean of values of which the largest counts as the second largest: what happened once is no habit."""
    *others, _ = sorted(values)
    return (sum(others) + max(others, default=0.0)) / len(values)


def changed_at(series: Sequence[tuple[int, float]], *, factor: float = 1.4) -> int | None:
    """Return the step from which a value is `factor` times as large as before, None if there is no such step.

    The series is cut in two where the squares of the distances to both means are least; single outliers are limited.

    Args:
        series: Steps in order, each with its value.
        factor: Ratio of the means after and before the change.
    """
    series = series[_WARM:]
    if len(series) < 8:
        return None
    values = sorted(value for _, value in series)
    most = 2 * values[int(0.95 * (len(values) - 1))]
    clipped = [min(value, most) for _, value in series]
    cut = _best_cut(clipped)
    before, after = clipped[:cut], clipped[cut:]
    low, high = sum(before) / len(before), sum(after) / len(after)
    spread = sorted(abs(later - earlier) for earlier, later in pairwise(clipped))[len(clipped) // 2]
    return series[cut][0] if high > factor * low and high - low > 2 * spread else None


def _best_cut(values: Sequence[float], least: int = 3) -> int:
    """Return where to cut `values` in two, so that both parts vary least; each has `least` at least."""
    total, squares = sum(values), sum(value * value for value in values)
    best, found, left, left_squares = float("inf"), least, sum(values[: least - 1]), 0.0
    left_squares = sum(value * value for value in values[: least - 1])
    for cut in range(least, len(values) - least + 1):
        left += values[cut - 1]
        left_squares += values[cut - 1] ** 2
        right, right_squares = total - left, squares - left_squares
        varies = left_squares - left**2 / cut + right_squares - right**2 / (len(values) - cut)
        if varies < best:
            best, found = varies, cut
    return found
