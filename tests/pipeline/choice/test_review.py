"""When a run changes its schedule: at once if it begins with a slower one, later only if another is clearly faster."""

from dataclasses import dataclass, field

import pytest

from stageline.pipeline.choice import ChosenSchedule, MeasuredTimes, ScheduleReview, StageBytes
from stageline.pipeline.choice.review import REVIEW
from stageline.pipeline.program import Costs
from stageline.pipeline.schedule import make_schedule, schedule_names
from support.shapes import line
from support.timed_steps import steps_of

WHOLE = {stage: StageBytes(100, 10, halfway=None) for stage in range(4)}  # their backwards cannot be split
SPLIT = {stage: StageBytes(100, 10) for stage in range(4)}


def review_of(microbatches: int, times: MeasuredTimes | None = None) -> ScheduleReview:
    return ScheduleReview(line(4), microbatches, 10**6, ("1f1b", None), times=times)


@dataclass
class ReviewedRun:
    """Four stages. A forward takes 1, a backward 2, its halves together `halving` times that."""

    review: ScheduleReview = field(default_factory=lambda: review_of(32))
    step: int = 0
    now: float = 0.0
    stages: dict[int, StageBytes] = field(default_factory=lambda: WHOLE)
    halving: float = 1.0

    def reviewed(self, latency: float, *, slower: float = 1.0) -> ChosenSchedule:
        """The outcome of the next review: over links of this latency, of steps that take `slower` times as long from
        one to the next as simulated."""
        self.now += REVIEW + 1
        self.review.advance(self.now, self.step, self.stages)
        self.step += 1
        name, window = self.review.present
        schedule = make_schedule(name, line(4), self.review.microbatches, window=window)
        backward = 2 * self.halving if schedule.halves_backwards else 2
        for step in steps_of(schedule, Costs.even(4, forward=1, backward=backward, latency=latency)):
            self.step += 1
            for stage, actions in step.items():
                later = self.step * (slower - 1) * 150
                shifted = [each._replace(start=each.start + later, end=each.end + later) for each in actions]
                self.review.note(self.step, stage, shifted)
        while (chosen := self.review.advance(self.now, self.step, self.stages)) is None:
            pass
        if chosen.changes:
            self.review.changed(chosen.name, chosen.window, self.step + 1, self.now)
        return chosen


def test_the_first_review_changes_a_schedule_that_is_slower_and_says_why() -> None:
    chosen = ReviewedRun().reviewed(1.5)
    assert (chosen.name, chosen.window, chosen.changes) == ("eager-1f1b", None, True)
    assert chosen.why.startswith("with the times of steps 2 to 5, a step takes 114 s by eager-1f1b; ")
    assert "; 183 s by 1f1b; not by zb-h1 or zb-h1 7,5,3,1 or zb-h1 10,7,4,1: backwards of stages 0," in chosen.why
    assert {each.name for each in chosen.compared} == {*schedule_names()}


def test_a_schedule_that_is_as_fast_stays() -> None:
    run = ReviewedRun()
    assert not run.reviewed(0).changes
    assert run.review.present == ("1f1b", None)


def test_links_that_become_slower_change_it_only_when_they_stay_so() -> None:
    run = ReviewedRun()
    run.reviewed(0)
    assert not run.reviewed(6).changes
    assert not run.reviewed(0).changes
    assert not run.reviewed(6).changes
    assert run.reviewed(6).changes
    assert run.review.present == ("window", (16, 11, 6, 1))


def test_what_is_a_little_faster_does_not_change_it_later() -> None:
    run = ReviewedRun()
    assert not run.reviewed(0).changes
    for _ in range(4):
        assert not run.reviewed(0.05).changes


def test_a_schedule_that_turns_out_slower_than_the_one_before_is_given_up_for_good() -> None:
    run = ReviewedRun()
    assert run.reviewed(1.5).changes
    back = run.reviewed(1.5, slower=3.0)
    assert back.changes
    assert back.name != "eager-1f1b"
    assert "more than before" in back.why
    assert run.reviewed(1.5).name != "eager-1f1b"


def test_steps_whose_times_are_not_known_are_not_used() -> None:
    run = ReviewedRun()
    run.review.note(1, 0, [])
    run.step = 1
    assert run.reviewed(1.5).why.startswith("with the times of steps 3 to 6")


def test_halves_that_promise_the_fastest_step_are_measured_by_running_them_and_stay_if_they_are() -> None:
    run = ReviewedRun(stages=SPLIT)
    tried = run.reviewed(0)
    assert (tried.name, tried.changes) == ("zb-h1", True)
    assert tried.why == (
        "to measure the two halves of backwards: with the times of steps 2 to 5, a step takes 105 s by 1f1b, and "
        "99 s by zb-h1 if they take no longer than the whole"
    )
    kept = run.reviewed(0)
    assert (kept.name, kept.changes) == ("zb-h1", False)
    assert kept.why.startswith(
        "with the times of steps 7 to 10, a step takes 99 s by zb-h1; 99 s by zb-h1 7,5,3,1; 105 s by gpipe; "
    )
    assert kept.times.halving == pytest.approx(1)


def test_halves_that_take_more_than_1_15_times_as_long_are_left_again_and_the_log_says_so() -> None:
    run = ReviewedRun(stages=SPLIT, halving=1.2)
    assert run.reviewed(0).name == "zb-h1"
    left = run.reviewed(0)
    assert (left.name, left.changes) == ("1f1b", True)
    assert left.why.endswith(
        "not by zb-h1 or zb-h1 7,5,3,1: the halves of a backward take 1.20 times as long as the whole, more than 1.15"
    )
    for _ in range(3):
        assert not run.reviewed(0).changes


def test_halves_are_not_measured_where_they_cannot_be_the_fastest() -> None:
    chosen = ReviewedRun(review_of(160), stages=SPLIT).reviewed(0)
    assert not chosen.changes
    assert "not by zb-h1 or zb-h1 7,5,3,1: the halves of backwards are not measured; at best, " in chosen.why


def test_a_review_that_begins_with_known_times_does_not_measure_halves_a_second_time() -> None:
    run = ReviewedRun(stages=SPLIT, halving=1.2)
    run.reviewed(0)
    run.reviewed(0)
    assert not ReviewedRun(review_of(32, run.review.times), stages=SPLIT).reviewed(0).changes
