"""Reviews of a run's schedule: the times at which it measures, ranks, and changes its schedule.

    steps     1 2 3 4      5 6 7 8 9 10     11 12 13 14    ...       every REVIEW seconds
              measured     ranked; then     measured: is it as fast as what it took before?
              with 1f1b    the change

The first choice may be hardly faster than the present schedule. Later another schedule must be clearly faster in two
reviews in a row, so that two schedules that are alike do not take turns.

Only steps that run halves of backwards tell how long the halves take. If such a schedule would be the fastest with
halves as long as the whole, the run takes it for the next sample, which decides.

    steps     1 2 3 4     5 6 7      8 9 10 11          12 13 14
              1f1b        ranked     zb-h1: I, W        ranked again, with I and W
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stageline.pipeline.schedule import Placement

from .measured import ActionTimes, MeasuredTimes
from .ranking import ALIKE, RankedSchedule, Ranking, StageBytes

SAMPLE = 4  # steps that are measured for a review
REVIEW = 10.0  # seconds from one review to the next
FASTER = 1.1  # times as fast: so much another schedule must be, in REVIEWS reviews in a row
REVIEWS = 2
SLOWER = 1.05  # times the step of the schedule before: one that takes longer is given up

Lasting = tuple[str, tuple[int, ...] | None]  # a schedule's name and window


@dataclass(frozen=True, slots=True)
class ChosenSchedule:
    """The outcome of a review: the schedule to go on with, which may be the present one.

    Attributes:
        name: Name of the schedule.
        window: Its window, None if it has none.
        changes: True if it is not the present schedule.
        why: The reason, for people.
        compared: All schedules that were ranked.
        times: Times with which they were simulated.
    """

    name: str
    window: tuple[int, ...] | None
    changes: bool
    why: str
    compared: tuple[RankedSchedule, ...]
    times: MeasuredTimes


@dataclass(slots=True)
class ScheduleReview:
    """State of the reviews of one run.

    Attributes:
        placement: The stages of each worker.
        microbatches: Microbatches of a step.
        limit: Bytes that a worker may take.
        present: Name and window of the schedule that the run has.
        begins: First step to measure. Step 0 is left out, since it loads what is loaded once. None between samples.
        first: True until a review has ended.
        times: Times measured last.
    """

    placement: Placement
    microbatches: int
    limit: int
    present: Lasting
    begins: int | None = 1
    first: bool = True
    times: MeasuredTimes | None = None
    _next: float = 0.0
    _steps: dict[int, dict[int, Sequence[ActionTimes]]] = field(default_factory=lambda: defaultdict(dict))
    _ranking: Ranking | None = None
    _measured: tuple[int, int] = (0, 0)  # the steps, first and last
    _former: tuple[Lasting, float] | None = None  # the schedule before, with the seconds of its steps
    _given_up: set[Lasting] = field(default_factory=set)
    _favourite: tuple[Lasting, int] | None = None  # what was clearly faster, and in how many reviews

    def wants(self, step: int) -> bool:
        """Return True if the times of `step` are to be noted."""
        return self.begins is not None and step >= self.begins and self._ranking is None

    def note(self, step: int, stage: int, actions: Sequence[ActionTimes]) -> None:
        """Note the actions that a stage has run in a step.

        Args:
            step: The step.
            stage: The stage.
            actions: Actions with their times. Empty if the times are not known: then the sample begins again.
        """
        if not actions:
            self._measure_from(step + 1)
        elif self.wants(step):
            self._steps[step][stage] = actions

    def changed(self, name: str, window: Sequence[int] | None, step: int, now: float) -> None:
        """Note that the run takes this schedule from `step` on.

        Measuring begins one step later, when the pipeline has come to the new order.

        Args:
            name: Name of the schedule.
            window: Its window, None if it has none.
            step: First step with the schedule.
            now: Time in seconds.
        """
        if self.times is not None and (name, window) != self.present:
            self._former = self.present, self.times.step
        self.present = name, None if window is None else tuple(window)
        self._next = now
        self._measure_from(step + 1)

    def interrupt(self, begun: int) -> None:
        """Begin the sample again, since steps are repeated after a loss.

        The new sample begins after step `begun`, the first that no stage has begun.
        """
        if self.begins is not None and self._ranking is None:
            self._measure_from(max(self.begins, begun + 1))

    def advance(self, now: float, begun: int, stages: Mapping[int, StageBytes]) -> ChosenSchedule | None:
        """Take one turn: begin to measure if a review is due, or rank one schedule, or decide.

        Args:
            now: Time in seconds.
            begun: First step that no stage has begun. A due review measures from the step after it.
            stages: Memory of each stage. No ranking begins before every stage is known.

        Returns:
            The decision; None if this turn decides nothing.
        """
        if self.begins is None and now >= self._next:
            self._measure_from(begun + 1)
        if self._ranking is None:
            self._begin_ranking(stages)
            return None
        if self._ranking.advance():
            return None
        ranking, self._ranking = self._ranking, None
        self._steps.clear()
        self.begins, self._next = None, now + REVIEW
        return self._decided(ranking)

    def _measure_from(self, step: int) -> None:
        self.begins = step
        self._steps.clear()

    def _begin_ranking(self, stages: Mapping[int, StageBytes]) -> None:
        count = sum(map(len, self.placement))
        whole = [step for step, noted in sorted(self._steps.items()) if len(noted) == count]
        if len(whole) >= SAMPLE and len(stages) == count:
            self._measured = whole[0], whole[-1]
            self.times = MeasuredTimes.of([self._steps[step] for step in whole], self.placement, self.times)
            self._ranking = Ranking(self.placement, self.microbatches, self.times, stages, self.limit)

    def _decided(self, ranking: Ranking) -> ChosenSchedule:
        present = ranking.like(*self.present)
        self._give_up_if_slower(ranking, present)
        best = ranking.best(self._given_up) or present
        if (halved := self._worth_measuring(ranking, present)) is not None:
            why = self._why_measured(best, halved)
            return ChosenSchedule(halved.name, halved.window, True, why, tuple(ranking.found), ranking.times)
        first, self.first = self.first, False
        lasting = best.name, best.window
        changes = lasting != self.present and (
            present.seconds is None or self.present in self._given_up or self._is_faster(best, present, first=first)
        )
        if lasting == self.present:
            self._favourite = None
        chosen = best if changes else present
        why = self._why(ranking, chosen, present)
        return ChosenSchedule(chosen.name, chosen.window, changes, why, tuple(ranking.found), ranking.times)

    def _worth_measuring(self, ranking: Ranking, present: RankedSchedule) -> RankedSchedule | None:
        """Return a schedule to take in order to see how long halves of backwards take, None if there is none.

        After the first review, it must be clearly faster at best. Its sample counts as the first again.
        """
        found = ranking.worth_measuring(ALIKE if self.first else FASTER)
        if found is None or (found.name, found.window) in self._given_up or present.seconds is None:
            return None
        self.first = True
        return found

    def _is_faster(self, best: RankedSchedule, present: RankedSchedule, *, first: bool) -> bool:
        if best.seconds is None or present.seconds is None:
            return False
        if first:
            return present.seconds > ALIKE * best.seconds
        lasting = best.name, best.window
        if present.seconds <= FASTER * best.seconds:
            self._favourite = None
            return False
        same = self._favourite is not None and self._favourite[0][0] == best.name
        self._favourite = lasting, (self._favourite[1] + 1 if same and self._favourite is not None else 1)
        return self._favourite[1] >= REVIEWS

    def _give_up_if_slower(self, ranking: Ranking, present: RankedSchedule) -> None:
        """Give up the present schedule if its measured step is longer than that of the schedule before.

        This is decided once after each change. The schedule before is simulated again: if links or costs have changed
        so that it would be slow now, too, the present schedule is kept.
        """
        former, self._former = self._former, None
        if former is None:
            return
        before, seconds = former
        again, now = ranking.like(*before), ranking.times.step
        if now > SLOWER * seconds and again.seconds is not None and again.seconds < now:
            self._given_up.add((present.name, present.window))

    def _why(self, ranking: Ranking, chosen: RankedSchedule, present: RankedSchedule) -> str:
        first, last = self._measured
        told = f"with the times of steps {first} to {last}, a step takes {_seconds(chosen)} by {chosen.title}"
        refused = _refused_halves(ranking.found)
        if (present.name, present.window) in self._given_up:
            slower = f"by {present.title} it took {ranking.times.step:.3g} s, more than before"
            return "; ".join([told, slower, *refused])
        others = [each for each in ranking.found if each.seconds is not None and each.title != chosen.title]
        known = present.seconds is not None
        if known and present.title != chosen.title and all(each.title != present.title for each in others):
            others.append(present)
        ordered = sorted(others, key=lambda each: each.seconds or 0.0)
        return "; ".join([told, *(f"{_seconds(each)} by {each.title}" for each in ordered), *refused])

    def _why_measured(self, fastest: RankedSchedule, halved: RankedSchedule) -> str:
        first, last = self._measured
        return (
            f"to measure the two halves of backwards: with the times of steps {first} to {last}, a step takes "
            f"{_seconds(fastest)} by {fastest.title}, and {halved.at_best:.3g} s by {halved.title} if they take no "
            "longer than the whole"
        )


def _seconds(ranked: RankedSchedule) -> str:
    return "no time that is known" if ranked.seconds is None else f"{ranked.seconds:.3g} s"


def _refused_halves(found: Sequence[RankedSchedule]) -> list[str]:
    """Return why schedules that split backwards are not taken, each reason once."""
    titles = defaultdict(list)
    for each in found:
        if each.halves and each.reason:
            titles[each.reason].append(each.title)
    return [f"not by {' or '.join(of_reason)}: {reason}" for reason, of_reason in titles.items()]
