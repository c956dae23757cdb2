"""Time that a run lost: to lost workers, to restarts of its broker, and to steps in which nothing went on.

    ends of steps   | | | | |                    |     | | | |
                            L      loss          S-1   S           L: the last step before, S: the first at the pace
                            └─── without the usual ──┘             time of a step for each of these: the time lost

A worker that is lost repeats the steps since the checkpoint: other stages wait until it has come to the step that they
are at. So the ends of one stage's steps show all of it. The last stage is never ahead of others. Where steps keep to a
slower pace afterwards, that is the new pace: it ends what was lost.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from stageline.broker.ledger.milestones import Milestone
from stageline.broker.ledger.times import StepTotals

BACK = 1.5  # times the usual time of a step, up to which a run is back at its pace
STALL, LEAST_STALL = 4.0, 2.0  # times the usual, and seconds beyond it, from which on a step is one that stood still
_NEAR = 16  # steps before one, from which the usual time is known
_STEADY = 8  # steps from one on, whose median is the new usual time if that one keeps to it


@dataclass(frozen=True, slots=True)
class Setback:
    """Time that a run lost at once.

    Attributes:
        what: "loss" of workers, restart of the "broker", or "stall" of a step for no reason that is recorded.
        at: When it began, in seconds since the epoch.
        step: The step that was to be finished next.
        seconds: Time lost.
        waited: Seconds of it until the lost places were back at work; in the rest, steps were repeated.
        workers: The lost workers.
        why: How they ended, continuing a sentence about the first of them.
    """

    what: str
    at: float
    step: int
    seconds: float
    waited: float = 0.0
    workers: tuple[int, ...] = ()
    why: str = ""


@dataclass(slots=True)
class _Stretch:
    """Steps `first` to `last`, by their place in the series, that took longer by `events`."""

    first: int
    last: int
    events: list[Milestone] = field(default_factory=list)


class StepEnds:
    """Ends of the steps of one stage, as far as they are known, in order."""

    def __init__(
        self,
        ends: Mapping[int, float],
        paused: Mapping[int, float] | None = None,
        away: Mapping[int, float] | None = None,
    ) -> None:
        """Take ends and pauses.

        Args:
            ends: By step, in seconds since the epoch.
            paused: Seconds of a step in which it waited for a cause that findings tell of.
            away: Seconds before the end of a step for which a person had paused the run.
        """
        self._steps = sorted(ends)
        self._ends = [ends[step] for step in self._steps]
        self._paused, self._away = paused or {}, away or {}

    @classmethod
    def of(
        cls, known: Iterable[StepTotals], more: Mapping[int, float], away: Mapping[int, float] | None = None
    ) -> "StepEnds":
        """Return the ends of steps whose sums are known, and of `more` steps; `away` as above."""
        sums = {each.step: each for each in known}
        paused = {step: _explained(each) for step, each in sums.items()}
        return cls({**more, **{step: each.end for step, each in sums.items()}}, paused, away)

    def setbacks(self, events: Sequence[Milestone]) -> list[Setback]:
        """Return the times that were lost to `events`, and to stalls, in the order of time."""
        stretches = self._joined([*self._after_events(events)])
        found = [self._setback(each, events) for each in stretches]
        inside = {place for each in stretches for place in range(each.first, each.last + 1)}
        stalls = (self._stalled(place) for place in range(1, len(self._steps)) if place not in inside)
        return sorted(
            (each for each in (*found, *stalls) if each is not None and each.seconds > 0), key=lambda each: each.at
        )

    def _took(self, place: int) -> float | None:
        """Return the seconds of the step at a place; None if the end of the step before is not known."""
        if place < 1 or self._steps[place] != self._steps[place - 1] + 1:
            return None
        return max(0.0, self._ends[place] - self._ends[place - 1] - self._away.get(self._steps[place], 0.0))

    def _usual(self, place: int) -> float | None:
        """Return the usual seconds of a step before a place; None if too little is known."""
        near = [took for each in range(max(1, place - _NEAR), place) if (took := self._took(each)) is not None]
        if len(near) < 3:
            near = [took for each in range(1, len(self._steps)) if (took := self._took(each)) is not None]
        return median(near) if len(near) >= 3 else None

    def _after_events(self, events: Iterable[Milestone]) -> Iterator[_Stretch]:
        for event in events:
            first = bisect_right(self._ends, event.at)  # the first step that ended after it
            usual = self._usual(first)
            if event.what == "return" or usual is None or not 0 < first < len(self._ends):
                continue
            # The last stage may still end a step or two, of which it has the messages.
            after = range(first, min(first + 3, len(self._ends)))
            first = last = next((each for each in after if (self._took(each) or 0.0) > BACK * usual), first)
            while last + 1 < len(self._ends) and self._is_late(last + 1, usual):
                last += 1
            yield _Stretch(first, last, [event])

    def _is_late(self, place: int, usual: float) -> bool:
        """Return True if a step takes longer than usual, and also than those after it: else they are slow for good."""
        took = self._took(place) or 0.0
        after = range(place, min(place + _STEADY, len(self._ends)))
        new = [each for each in map(self._took, after) if each is not None]
        return took > BACK * usual and (len(new) < 3 or took > BACK * median(new))

    def _joined(self, stretches: Iterable[_Stretch]) -> list[_Stretch]:
        """Return the stretches, of which none touches another: those that do are one."""
        found: list[_Stretch] = []
        for each in sorted(stretches, key=lambda one: one.first):
            if found and each.first <= found[-1].last:
                found[-1] = _Stretch(found[-1].first, max(found[-1].last, each.last), found[-1].events + each.events)
            else:
                found.append(each)
        return found

    def _lost(self, first: int, last: int) -> float:
        usual = self._usual(first) or 0.0
        return sum(
            max(0.0, took - usual) for place in range(first, last + 1) if (took := self._took(place)) is not None
        )

    def _setback(self, stretch: _Stretch, events: Iterable[Milestone]) -> Setback | None:
        seconds, usual = self._lost(stretch.first, stretch.last), self._usual(stretch.first) or 0.0
        if any(each.what == "resume" for each in stretch.events):
            return None  # it is not recorded how long a person wanted the run to rest
        losses = [each for each in stretch.events if each.what in ("loss", "leave")]
        step, at = self._steps[stretch.first], stretch.events[0].at
        if not losses:
            return Setback("broker", at, step, seconds) if seconds > usual else None
        workers = tuple(dict.fromkeys(each.worker for each in losses if each.worker is not None))
        end = self._ends[stretch.last]
        back = [each.at for each in events if each.what == "return" and at <= each.at <= end]
        waited = min(seconds, max(back, default=end) - losses[0].at)
        return Setback("loss", losses[0].at, step, seconds, waited, workers, losses[0].why)

    def _stalled(self, place: int) -> Setback | None:
        took, step = self._took(place), self._steps[place]
        if took is None or took < LEAST_STALL or (usual := self._usual(place)) is None:
            return None
        lost = took - usual - self._paused.get(step, 0.0)
        if lost < max((STALL - 1) * usual, LEAST_STALL):
            return None
        return Setback("stall", self._ends[place - 1], step, lost)


def _explained(sums: StepTotals) -> float:
    """Return the seconds of a step in which its stage waited for a cause that findings tell of."""
    own = sums.data + sums.disk + sums.script + sums.evaluation + sums.switching + sums.offload
    return own + sums.credit + sums.room
