"""When a run changes its schedule: at once if it begins with a slower one, later only if another is clearly faster."""

from dataclasses import dataclass, field

from stageline.pipeline.choice import ChosenSchedule, ScheduleReview, StageBytes
from stageline.pipeline.choice.review import REVIEW
from stageline.pipeline.schedule import make_schedule, schedule_names
from stageline.pipeline.schedule.check import Costs
from support.shapes import line
from support.timed_steps import steps_of

BYTES = {stage: StageBytes(100, 10) for stage in range(4)}


@dataclass
class ReviewedRun:
    """Four stages and 32 microbatches, whose steps take what the `costs` say, and `slower` times as long from one to
    the next as simulated."""

    review: ScheduleReview = field(default_factory=lambda: ScheduleReview(line(4), 32, 10**6, ("1f1b", None)))
    step: int = 0
    now: float = 0.0

    def reviewed(self, latency: float, *, slower: float = 1.0) -> ChosenSchedule:
        """The outcome of the next review."""
        self.now += REVIEW + 1
        self.review.advance(self.now, self.step, BYTES)
        self.step += 1
        name, window = self.review.present
        schedule = make_schedule(name, line(4), 32, window=window)
        for step in steps_of(schedule, Costs.even(4, forward=1, backward=2, latency=latency)):
            self.step += 1
            for stage, actions in step.items():
                later = self.step * (slower - 1) * 150
                shifted = [each._replace(start=each.start + later, end=each.end + later) for each in actions]
                self.review.note(self.step, stage, shifted)
        while (chosen := self.review.advance(self.now, self.step, BYTES)) is None:
            pass
        if chosen.changes:
            self.review.changed(chosen.name, chosen.window, self.step + 1, self.now)
        return chosen


def test_the_first_review_changes_a_schedule_that_is_slower_and_says_why() -> None:
    chosen = ReviewedRun().reviewed(1.5)
    assert (chosen.name, chosen.window, chosen.changes) == ("eager-1f1b", None, True)
    assert chosen.why.startswith("with the times of steps 2 to 5, a step takes 114 s by eager-1f1b; ")
    assert chosen.why.endswith("183 s by 1f1b")
    assert len(chosen.compared) == len(schedule_names())


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
