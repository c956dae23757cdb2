"""The checker: one simulation by hand, the catalogue's formulas over many shapes, and what broken schedules raise."""

from dataclasses import replace
from itertools import pairwise

import pytest

from stageline.pipeline.program import Costs, Disordered, Verdict, check_schedule, compile_program
from stageline.pipeline.schedule import (
    Action,
    Kind,
    Schedule,
    forward_only,
    make_schedule,
    schedule_names,
    v_shaped,
    window_for,
)
from support.paths import DOCS
from support.shapes import accepted, line, looped, random_costs, scattered, times

FORWARD, BACKWARD = 1, 2
LATENCIES = (0, 0.25, 0.5, 1, 1.5, 3, 6)


def test_two_stages_and_two_microbatches_by_hand() -> None:
    verdict = check_schedule(
        make_schedule("1f1b", line(2), 2), Costs.even(2, forward=1, backward=2, update=0.5, latency=0.25)
    )
    assert times(verdict, 0) == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "0B0": (4.5, 6.5),  # 1B0 ends at 4.25
        "0B1": (7.5, 9.5),  # 1B1 ends at 7.25
        "0U": (9.5, 10),
    }
    assert times(verdict, 1) == {
        "1F0": (1.25, 2.25),
        "1B0": (2.25, 4.25),
        "1F1": (4.25, 5.25),
        "1B1": (5.25, 7.25),
        "1U": (7.25, 7.75),
    }
    assert verdict.span == 10
    assert verdict.busy == (6.5, 6.5)
    assert verdict.ideal == 6.5
    assert verdict.bubble == 3.5
    assert verdict.idle == (0.35, 0.35)
    assert verdict.stage_peak == verdict.worker_peak == (2, 1)
    assert verdict.queue_bound == {"forward-1": 2, "backward-0": 2}


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_the_bubble_is_one_pass_through_the_stages_behind_the_first(name: str, stages: int) -> None:
    for schedule in accepted(name, line(stages), 16):
        verdict = check_schedule(schedule, Costs.even(stages, forward=1.5, backward=2.5))
        assert verdict.bubble == (stages - 1) * 4
        assert verdict.bubble / verdict.span == pytest.approx((stages - 1) / (schedule.microbatches + stages - 1))


@pytest.mark.parametrize("stages", range(1, 7))
def test_the_peak_in_flight_is_the_catalogues(stages: int) -> None:
    for microbatches in range(1, 17):
        peak = {
            name: check_schedule(make_schedule(name, line(stages), microbatches)).stage_peak
            for name in schedule_names()[:3]
        }
        behind = range(stages - 1, -1, -1)
        assert peak["gpipe"] == (microbatches,) * stages
        assert peak["1f1b"] == tuple(min(microbatches, stages_behind + 1) for stages_behind in behind)
        assert peak["eager-1f1b"] == tuple(min(microbatches, 2 * stages_behind + 1) for stages_behind in behind)


@pytest.mark.parametrize("workers", range(1, 6))
@pytest.mark.parametrize("turns", range(1, 5))
def test_interleaving_divides_the_bubble_by_the_stages_of_a_worker(workers: int, turns: int) -> None:
    schedule = make_schedule("interleaved-1f1b", looped(workers, turns), 4 * workers)
    verdict = check_schedule(schedule, Costs.even(workers * turns))
    assert verdict.bubble == (workers - 1) * 3
    assert verdict.worker_peak == tuple((turns - 1) * workers + 2 * behind + 1 for behind in range(workers - 1, -1, -1))


@pytest.mark.parametrize("workers", range(1, 6))
@pytest.mark.parametrize("turns", range(1, 5))
def test_interleaving_is_sound_for_every_number_it_accepts(workers: int, turns: int) -> None:
    for schedule in accepted("interleaved-1f1b", looped(workers, turns), 16):
        verdict = check_schedule(schedule)
        assert verdict.span >= verdict.ideal == schedule.microbatches * turns * 3


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "zb-h1"])
def test_any_placement_is_sound(name: str) -> None:
    for seed in range(60):
        stages, microbatches = 1 + seed % 8, 1 + 3 * seed % 16
        schedule = make_schedule(name, scattered(stages, seed), microbatches, first_trainable=seed % 3 % stages)
        costs = random_costs(seed, stages)
        for steps in (1, 3):
            verdict = check_schedule(schedule, costs, steps=steps)
            assert verdict.span >= verdict.ideal
            assert_nothing_starts_before_its_data(schedule, costs, verdict)


def test_asynchronous_placements_are_sound() -> None:
    for seed in range(30):
        stages = 1 + seed % 6
        costs = random_costs(seed, stages)
        for name, microbatches in (("1f1b", 1), ("2bw", stages + seed % 2)):
            placement, first = scattered(stages, seed), seed % 3 % stages
            schedule = make_schedule(name, placement, microbatches, mode="async", first_trainable=first)
            assert_nothing_starts_before_its_data(schedule, costs, check_schedule(schedule, costs, steps=12))


def assert_nothing_starts_before_its_data(schedule: Schedule, costs: Costs, verdict: Verdict) -> None:
    program = compile_program(schedule)
    ends = {(each.step, each.action): each.end for each in verdict.timed}
    for each in verdict.timed:
        stage, microbatch = each.action.stage, each.action.microbatch
        match each.action.kind:
            case Kind.FORWARD if stage > 0:
                source, hop = Action(Kind.FORWARD, stage - 1, microbatch), stage - 1
            case Kind.BACKWARD | Kind.INPUT if stage < schedule.stages - 1:
                before = Kind.INPUT if program.splits(stage + 1) else Kind.BACKWARD
                source, hop = Action(before, stage + 1, microbatch), stage
            case _:
                continue
        local = schedule.owner(hop) == schedule.owner(hop + 1)
        assert each.start >= ends[each.step, source] + (0 if local else costs.latency[hop])
    for worker in range(len(schedule.placement)):
        own = [each for each in verdict.timed if each.worker == worker]
        assert all(before.end <= after.start for before, after in pairwise(own))


# The span in units of M (F + B), for four workers and 32 microbatches, at each of LATENCIES in units of F.
STRETCH = {
    "1f1b": (1.094, 1.229, 1.365, 1.635, 1.906, 2.719, 4.344),
    "interleaved-1f1b": (1.047, 1.083, 1.120, 1.401, 1.745, 2.781, 4.906),
    "looped-bfs": (1.047, 1.062, 1.078, 1.109, 1.141, 1.234, 1.526),
    "zb-v": (1.016, 1.049, 1.089, 1.182, 1.484, 2.391, 4.203),
    "dualpipe-v": (1.016, 1.057, 1.104, 1.406, 1.708, 2.615, 4.427),
    "zb-h1": (1.031, 1.062, 1.094, 1.365, 1.635, 2.448, 4.073),
    "gpipe": (1.094, 1.109, 1.125, 1.156, 1.188, 1.281, 1.469),
    "eager-1f1b": (1.094, 1.109, 1.125, 1.156, 1.188, 1.688, 2.688),
    "window": (1.094, 1.109, 1.125, 1.156, 1.188, 1.281, 1.469),
    "zb-h1, window": (1.031, 1.039, 1.047, 1.062, 1.125, 1.219, 1.406),
}


def test_every_schedule_has_its_stretches() -> None:
    assert STRETCH.keys() == {*schedule_names(), "zb-h1, window"}


@pytest.mark.parametrize("name", STRETCH)
def test_latency_stretches_a_step_as_the_catalogue_computes(name: str) -> None:
    folded = name in ("zb-v", "dualpipe-v")
    turns = 2 if folded or name in ("interleaved-1f1b", "looped-bfs") else 1
    placement = v_shaped(4) if folded else looped(4, turns)
    stretch = []
    for latency in LATENCIES:
        window = window_for([latency] * 3, FORWARD, BACKWARD) if name.endswith("window") else None
        costs = Costs.even(4 * turns, forward=FORWARD / turns, backward=BACKWARD / turns, latency=latency)
        stretch.append(
            round(
                check_schedule(make_schedule(name.partition(",")[0], placement, 32, window=window), costs).span / 96, 3
            )
        )
    assert tuple(stretch) == pytest.approx(STRETCH[name], abs=5e-4 + 1e-9)


def test_the_documented_stretches_are_these() -> None:
    page = (DOCS / "reference/schedules.md").read_text(encoding="utf-8")
    documented = {
        cells[1].split("`")[1]: cells[2:-1]
        for row in page.splitlines()
        if len(cells := row.split("|")) == 10 and "`" in cells[1]
    }
    assert {name: tuple(map(float, cells)) for name, cells in documented.items()} == STRETCH


@pytest.mark.parametrize("stages", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("latency", LATENCIES)
def test_the_window_for_a_latency_hides_it_and_is_the_smallest_that_does(stages: int, latency: float) -> None:
    microbatches = 8 * stages + 40
    window = window_for([latency] * (stages - 1), FORWARD, BACKWARD)
    costs = Costs.even(stages, latency=latency)
    span = check_schedule(make_schedule("window", line(stages), microbatches, window=window), costs).span
    assert span == (microbatches + stages - 1) * 3 + 2 * latency * (stages - 1)
    smaller = (window[0] - 1, *window[1:])
    assert check_schedule(make_schedule("window", line(stages), microbatches, window=smaller), costs).span > span


def test_a_hop_within_a_worker_takes_no_time() -> None:
    schedule = make_schedule("1f1b", ((0, 1),), 3)
    assert check_schedule(schedule, Costs.even(2, latency=100)).bubble == 0


def test_asynchronous_1f1b_has_no_bubble_once_it_is_warm() -> None:
    for stages in range(1, 6):
        verdict = check_schedule(make_schedule("1f1b", line(stages), 1, mode="async"), steps=40)
        assert verdict.span == (40 + stages - 1) * 3
        assert verdict.stage_peak == tuple(range(stages, 0, -1))


@pytest.mark.parametrize("stages", range(1, 6))
def test_with_two_versions_there_is_no_bubble_either_and_as_many_microbatches_in_flight(stages: int) -> None:
    for microbatches in (stages, stages + 3):
        schedule = make_schedule("2bw", line(stages), microbatches, mode="async")
        verdict = check_schedule(schedule, steps=20)
        assert verdict.span == (20 * microbatches + stages - 1) * 3
        assert verdict.stage_peak == tuple(range(stages, 0, -1))
        assert check_schedule(schedule).queue_bound == verdict.queue_bound


def test_a_third_version_would_be_needed_with_fewer_microbatches() -> None:
    few = replace(make_schedule("2bw", line(4), 4, mode="async"), microbatches=1)
    lists = tuple(tuple(action for _, action in few.program(worker, range(1))) for worker in range(4))
    with pytest.raises(Disordered, match="before 0U of step 0, which must come first"):
        check_schedule(replace(few, workers=lists))


def test_without_a_number_of_steps_asynchronous_mode_runs_until_it_is_steady() -> None:
    schedule = make_schedule("1f1b", line(4), 1, mode="async")
    verdict = check_schedule(schedule)
    assert verdict.stage_peak == check_schedule(schedule, steps=40).stage_peak
    assert verdict.queue_bound == check_schedule(schedule, steps=40).queue_bound


def test_a_stage_that_does_not_train_holds_nothing() -> None:
    assert check_schedule(make_schedule("1f1b", line(3), 8, first_trainable=1)).stage_peak == (0, 2, 1)
    assert check_schedule(forward_only(((0, 2), (1,)), 8)).worker_peak == (0, 0)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "eager-1f1b", "interleaved-1f1b"])
@pytest.mark.parametrize("seed", range(12))
def test_stages_that_run_ahead_never_wait_for_ever_with_credit_for_what_one_step_puts(name: str, seed: int) -> None:
    stages = seed % 3 + 2
    placement = looped(2, 2) if name == "interleaved-1f1b" else scattered(stages, seed)
    for schedule in accepted(name, placement, 6, first_trainable=seed % stages):
        bounds = check_schedule(schedule).queue_bound
        check_schedule(schedule, steps=5, windows={queue: bounds[queue] for queue in compile_program(schedule).ahead})


@pytest.mark.parametrize("seed", range(40))
def test_in_asynchronous_mode_neither_and_on_one_worker_they_are_ahead_by_a_few_microbatches(seed: int) -> None:
    stages = seed % 4 + 2
    schedule = make_schedule("1f1b", scattered(stages, seed), 1, mode="async", first_trainable=seed % stages)
    bounds = check_schedule(schedule).queue_bound
    windows = {queue: bounds[queue] for queue in compile_program(schedule).ahead}
    found = check_schedule(schedule, steps=20 * stages, windows=windows).queue_bound
    assert all(found[queue] <= bounds[queue] for queue in found)


def test_a_worker_that_has_a_later_stage_too_does_not_run_ahead_of_that() -> None:
    """It ran the first stage three times as often as the other, over a whole run."""
    schedule = make_schedule("1f1b", ((0, 2), (1,)), 1, mode="async", first_trainable=1)
    ahead = most = 0
    for _, action in schedule.program(0, range(200)):
        ahead += (action == Action(Kind.FORWARD, 0)) - (action == Action(Kind.FORWARD, 2))
        most = max(most, ahead)
    assert most <= 5


def test_the_backward_of_a_frozen_stage_computes_one_gradient_of_two() -> None:
    verdict = check_schedule(make_schedule("gpipe", line(3), 1, first_trainable=1), Costs.even(3, frozen=[2]))
    assert times(verdict, 0) == {"0F0": (0, 1), "0U": (1, 1)}
    assert times(verdict, 2) == {"2F0": (2, 3), "2B0": (3, 4), "2U": (4, 4)}
    assert times(verdict, 1) == {"1F0": (1, 2), "1B0": (4, 6), "1U": (6, 6)}
