"""From the times of steps that are simulated with known costs come those costs, whatever the workers' clocks show."""

from dataclasses import replace

import pytest

from stageline.pipeline.choice import MeasuredTimes, StepActions
from stageline.pipeline.choice.measured import ActionTimes
from stageline.pipeline.program import Costs, Program, TiedStages, Ties, check_schedule, compile_program
from stageline.pipeline.schedule import Action, Kind, Placement, Schedule, make_schedule
from support.shapes import line, looped
from support.timed_steps import steps_of

COSTS = replace(
    Costs.even(4, forward=0.01, backward=0.02, update=0.003),
    forward=(0.01, 0.012, 0.008, 0.01),
    latency=(0.02, 0, 0.004),
)


def tied(ties: Ties, schedule: Schedule) -> Program:
    return compile_program(schedule, [TiedStages(ties)])


def measured(
    name: str, placement: Placement, microbatches: int = 8, costs: Costs = COSTS, **more: int
) -> MeasuredTimes:
    return MeasuredTimes.of(steps_of(make_schedule(name, placement, microbatches), costs), placement)


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "gpipe"])
def test_what_actions_and_messages_take_is_found_with_clocks_that_do_not_agree(name: str) -> None:
    found = measured(name, line(4))
    assert found.forward == pytest.approx(COSTS.forward)
    assert found.backward == pytest.approx((0.02,) * 4)
    assert found.update == pytest.approx((0.003,) * 4)
    assert found.latency == pytest.approx(COSTS.latency)
    assert found.transfer == (0.0,) * 3
    assert found.input == found.weight == (None,) * 4
    assert found.halving is None
    assert found.first_trainable == 0


def test_neighbours_on_one_worker_have_no_latency() -> None:
    assert measured("1f1b", ((0, 1), (2, 3))).latency == pytest.approx((0, 0, 0))
    assert measured("interleaved-1f1b", looped(2, 2), costs=replace(COSTS, latency=(0.02,) * 3)).latency == (
        pytest.approx((0.02,) * 3)
    )


def test_to_a_stage_without_backwards_nothing_comes_back_so_its_latency_does_not_count() -> None:
    found = MeasuredTimes.of(
        steps_of(make_schedule("1f1b", line(3), 8, first_trainable=2), Costs.even(3, latency=0.5), clocks=0), line(3)
    )
    assert found.backward == (None, None, 2)
    assert found.first_trainable == 2
    assert found.latency == (0.0, 0.0)


def test_a_step_takes_from_its_end_to_the_end_of_the_next() -> None:
    schedule = make_schedule("1f1b", line(4), 8)
    assert measured("1f1b", line(4)).step == pytest.approx(check_schedule(schedule, COSTS).span, rel=0.05)


def halved(actions: StepActions, ratio: float) -> StepActions:
    """The same, each backward in two halves that take `ratio` times as long together."""

    def halves(each: ActionTimes) -> list[ActionTimes]:
        if each.action.kind is not Kind.BACKWARD:
            return [each]
        half = (each.end - each.start) * ratio / 2
        return [ActionTimes(Action(kind, *each.action[1:]), 0.0, half) for kind in (Kind.INPUT, Kind.WEIGHT)]

    return {stage: [part for each in found for part in halves(each)] for stage, found in actions.items()}


def test_halves_are_compared_with_the_whole_as_it_was_before() -> None:
    steps = steps_of(make_schedule("1f1b", line(4), 8), COSTS)
    before = MeasuredTimes.of(steps, line(4))
    found = MeasuredTimes.of([halved(step, 1.3) for step in steps], line(4), before)
    assert found.halving == pytest.approx(1.3)
    assert found.backward == before.backward
    assert found.costs(halved=True).input == pytest.approx((0.013,) * 4)
    assert found.costs(halved=False).input == pytest.approx((0, 0.01, 0.01, 0.01))


def test_what_is_known_from_before_has_become_as_much_slower_as_forwards_have() -> None:
    before = MeasuredTimes.of(steps_of(make_schedule("1f1b", line(4), 8), COSTS), line(4))
    slower = replace(
        COSTS, forward=tuple(1.5 * each for each in COSTS.forward), input=(0.015,) * 4, weight=(0.015,) * 4
    )
    found = MeasuredTimes.of(steps_of(make_schedule("zb-h1", line(4), 8), slower), line(4), before)
    assert found.backward == pytest.approx((0.03,) * 4)
    assert found.halving == pytest.approx(1)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_stage_that_sends_gradients_of_shared_parameters_is_simulated_with_whole_backwards(name: str) -> None:
    """Schedules are ranked without the model, as if each could split its backwards."""
    ties = ((0, 3),)
    found = MeasuredTimes.of(steps_of(tied(ties, make_schedule(name, line(4), 8)), COSTS), line(4)).costs(halved=True)
    assert (found.input[3], found.weight[3]) == (pytest.approx(0.02), 0.0)
    as_run = replace(found, input=(*found.input[:3], 0.01), weight=(*found.weight[:3], 0.01))
    runs = check_schedule(tied(ties, make_schedule("zb-h1", line(4), 8)), as_run)
    total = max(COSTS.latency) + 0.003  # it goes from stage 0 to stage 3, which then updates: after every schedule
    assert check_schedule(make_schedule("zb-h1", line(4), 8), found).span + total == pytest.approx(runs.span)


def test_a_stage_whose_whole_backward_was_never_measured_takes_its_halves_also_if_it_names_shared_parameters() -> None:
    """Its backward was simulated as taking no time."""
    steps = [halved(step, 1.0) for step in steps_of(tied(((0, 3),), make_schedule("1f1b", line(4), 8)), COSTS)]
    found = MeasuredTimes.of(steps, line(4)).costs(halved=True)
    assert (found.input[3], found.weight[3]) == pytest.approx((0.01, 0.01))


def test_the_first_stage_that_trains_is_taken_to_compute_all_in_its_second_half() -> None:
    found = measured("1f1b", line(4)).costs(halved=True)
    assert found.input == pytest.approx((0, 0.01, 0.01, 0.01))
    assert found.weight == pytest.approx((0.02, 0.01, 0.01, 0.01))


def test_messages_that_hold_each_other_up_show_how_long_each_keeps_the_link_busy() -> None:
    """Of eight messages, sent 10 ms apart, each takes the link for 30 ms."""
    sent = [ActionTimes(Action(Kind.FORWARD, 0, m), 0.01 * m, 0.01 * (m + 1)) for m in range(8)]
    arrived = [0.05 + 0.03 * m for m in range(8)]
    taken = [ActionTimes(Action(Kind.FORWARD, 1, m), at, at + 0.01) for m, at in enumerate(arrived)]
    found = MeasuredTimes.of([{0: sent, 1: taken}], line(2))
    assert found.transfer == pytest.approx((0.03,))
