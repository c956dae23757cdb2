"""Lists that lack an action, have one too many, or have one before what it builds on."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from stageline.pipeline.schedule import Action, Schedule, make_schedule
from stageline.pipeline.schedule.check import Costs, Disordered, Incomplete, check_schedule
from support.shapes import by_hand, line, times


def test_a_backward_may_be_split() -> None:
    verdict = check_schedule(
        by_hand("0F0 0F1 0I0 0W0 0I1 0W1 0U", "1F0 1I0 1F1 1I1 1W0 1W1 1U", microbatches=2),
        Costs.even(2, forward=1, backward=2),
    )
    assert times(verdict, 0)["0I1"] == (5, 6)  # at once after 1I1, which did not wait for 1W0
    assert verdict.stage_peak == (2, 2)  # a microbatch is held until its W


def test_halves_and_whole_backwards_may_be_mixed() -> None:
    check_schedule(by_hand("0F0 0B0 0F1 0I1 0W1 0U", microbatches=2))


@pytest.mark.parametrize(
    ("lists", "reason"),
    [
        (("0F0 0U",), "worker 0 never runs 0B0 of step 0"),
        (("0F0 0B0",), "worker 0 never runs 0U of step 0"),
        (("0F0 0I0 0U",), "worker 0 never runs 0W0 of step 0"),
        (("0F0 0B0 0T0 0U",), "worker 0 runs 0T0 of step 0 though it is none of its actions"),
        (("0F0 0F0 0B0 0U",), "worker 0 runs 0F0 of step 0 more than once"),
        (("0F0 0B0 0I0 0W0 0U",), "worker 0 runs 0I0 of step 0 though it is none of its actions"),
        (("0F0 0F1 0B0 0U",), "worker 0 runs 0F1 of step 0 though it is none of its actions"),
        (("0F0 0B0 0U 1F0", "1F0 1B0 1U"), "worker 0 runs 1F0 of step 0 though it is none of its actions"),
    ],
)
def test_a_list_must_have_every_action_once_and_no_other(lists: tuple[str, ...], reason: str) -> None:
    with pytest.raises(Incomplete, match=f"schedule by-hand: {reason}"):
        check_schedule(by_hand(*lists))


@pytest.mark.parametrize(
    ("lists", "reason"),
    [
        (("0F1 0F0 0B0 0B1 0U",), "worker 0 has 0F1 of step 0 before 0F0 of step 0, which must come first"),
        (("0F0 0F1 0B1 0B0 0U",), "0B1 of step 0 before 0B0"),
        (("0F0 0B0 0B1 0F1 0U",), "0B1 of step 0 before 0F1"),
        (("0F0 0F1 0B0 0U 0B1",), "0U of step 0 before 0B1"),
        (("0F0 0F1 0W0 0I0 0I1 0W1 0U",), "0W0 of step 0 before 0I0"),
        (("0F0 0F1 0I0 0I1 0W1 0W0 0U",), "0W1 of step 0 before 0W0"),
        (("0F0 0F1 0I0 0B1 0W0 0U",), "0B1 of step 0 before 0W0"),
    ],
)
def test_a_list_must_have_every_action_after_those_it_builds_on(lists: tuple[str, ...], reason: str) -> None:
    with pytest.raises(Disordered, match=reason):
        check_schedule(by_hand(*lists, microbatches=2))


def test_a_step_must_end_before_the_next_begins() -> None:
    class Overlapping(Schedule):
        def program(self, worker: int, steps: range) -> Iterator[tuple[int, Action]]:
            return iter([(step, each) for each in self.workers[worker] for step in steps])

    schedule = make_schedule("gpipe", line(1), 1)
    overlapping = Overlapping(schedule.name, schedule.mode, schedule.placement, 1, schedule.workers)
    with pytest.raises(Disordered, match="0F0 of step 1 before 0U of step 0"):
        check_schedule(overlapping, steps=2)


@pytest.mark.parametrize(
    ("last", "error", "reason"),
    [
        ("1F0 1B0 1F1 1B1 1T1 1U", Incomplete, "worker 1 never runs 1T0 of step 0"),
        ("1F0 1T0 1B0 1F1 1B1 1T1 1U", Disordered, "1T0 of step 0 before 1B0"),
        ("1F0 1B0 1F1 1B1 1T0 1T1 1U", Disordered, "1B1 of step 0 before 1T0"),  # a stage holds those of one backward
        ("1F0 1B0 1T0 1F1 1B1 1U 1T1", Disordered, "1U of step 0 before 1T1"),
    ],
)
def test_gradients_of_what_stages_share_are_sent_after_each_backward(last: str, error: type, reason: str) -> None:
    schedule = replace(by_hand("0F0 0F1 0B0 0B1 0U", last, microbatches=2), ties=((0, 1),))
    with pytest.raises(error, match=reason):
        check_schedule(schedule)


@pytest.mark.parametrize(
    ("first", "error", "reason"),
    [
        ("0F0 0B0 0U", Incomplete, "worker 0 never runs 0S of step 0"),
        ("0F0 0S 0B0 0U", Disordered, "0S of step 0 before 0B0"),
        ("0F0 0B0 0U 0S", Disordered, "0U of step 0 before 0S"),
    ],
)
def test_the_sums_of_a_step_are_sent_after_its_backwards_and_before_its_update(
    first: str, error: type, reason: str
) -> None:
    schedule = replace(by_hand(first, "1F0 1B0 1S 1U"), ties=((0, 1),), tied="step")
    with pytest.raises(error, match=reason):
        check_schedule(schedule)
