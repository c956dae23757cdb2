"""The checker: one replay by hand, the catalogue's formulas over many shapes, and what it finds in broken schedules."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.check import Costs, Deadlock, Disordered, Incomplete, Unsound, Verdict, check
from pipeline.schedule import Action, Kind, Schedule, ScheduleRefused, forward_only, make, names, window_for
from pipeline.schedule.alternating import alternate
from shapes import accepted, line, looped, scattered

FORWARD, BACKWARD = 1, 2
LATENCIES = (0, 0.25, 0.5, 1, 1.5, 3, 6)


def written(*workers: str, microbatches: int = 1) -> Schedule:
    """A schedule written down by hand, with a worker for each stage."""
    lists = tuple(tuple(map(Action.parse, actions.split())) for actions in workers)
    return Schedule("by-hand", "sync", line(len(workers)), microbatches, lists)


def times(verdict: Verdict, worker: int) -> dict[str, tuple[float, float]]:
    return {str(each.action): (each.start, each.end) for each in verdict.timed if each.worker == worker}


def test_two_stages_and_two_microbatches_by_hand() -> None:
    verdict = check(make("1f1b", line(2), 2), Costs.even(2, forward=1, backward=2, update=0.5, latency=0.25))
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
        verdict = check(schedule, Costs.even(stages, forward=1.5, backward=2.5))
        assert verdict.bubble == (stages - 1) * 4
        assert verdict.bubble / verdict.span == pytest.approx((stages - 1) / (schedule.microbatches + stages - 1))


@pytest.mark.parametrize("stages", range(1, 7))
def test_the_peak_in_flight_is_the_catalogues(stages: int) -> None:
    for microbatches in range(1, 17):
        peak = {name: check(make(name, line(stages), microbatches)).stage_peak for name in names()[:3]}
        behind = range(stages - 1, -1, -1)
        assert peak["gpipe"] == (microbatches,) * stages
        assert peak["1f1b"] == tuple(min(microbatches, stages_behind + 1) for stages_behind in behind)
        assert peak["eager-1f1b"] == tuple(min(microbatches, 2 * stages_behind + 1) for stages_behind in behind)


@pytest.mark.parametrize("workers", range(1, 6))
@pytest.mark.parametrize("turns", range(1, 5))
def test_interleaving_divides_the_bubble_by_the_stages_of_a_worker(workers: int, turns: int) -> None:
    schedule = make("interleaved-1f1b", looped(workers, turns), 4 * workers)
    verdict = check(schedule, Costs.even(workers * turns))
    assert verdict.bubble == (workers - 1) * 3
    assert verdict.worker_peak == tuple((turns - 1) * workers + 2 * behind + 1 for behind in range(workers - 1, -1, -1))


@pytest.mark.parametrize("workers", range(1, 6))
@pytest.mark.parametrize("turns", range(1, 5))
def test_interleaving_is_sound_for_every_number_it_accepts(workers: int, turns: int) -> None:
    for schedule in accepted("interleaved-1f1b", looped(workers, turns), 16):
        verdict = check(schedule)
        assert verdict.span >= verdict.ideal == schedule.microbatches * turns * 3


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_any_placement_is_sound(name: str) -> None:
    for seed in range(60):
        stages, microbatches = 1 + seed % 8, 1 + 3 * seed % 16
        schedule = make(name, scattered(stages, seed), microbatches, first_trainable=seed % 3 % stages)
        costs = Costs(*random_costs(seed, stages))
        for steps in (1, 3):
            verdict = check(schedule, costs, steps=steps)
            assert verdict.span >= verdict.ideal
            assert_nothing_starts_before_its_data(schedule, costs, verdict)


def test_asynchronous_placements_are_sound() -> None:
    for seed in range(30):
        stages = 1 + seed % 6
        schedule = make("1f1b", scattered(stages, seed), 1, mode="async", first_trainable=seed % 3 % stages)
        costs = Costs(*random_costs(seed, stages))
        assert_nothing_starts_before_its_data(schedule, costs, check(schedule, costs, steps=12))


def random_costs(seed: int, stages: int) -> list[tuple[float, ...]]:
    random = Random(seed)
    return [tuple(random.choice((0.5, 1, 2, 3)) for _ in range(count)) for count in (*[stages] * 4, stages - 1)]


def assert_nothing_starts_before_its_data(schedule: Schedule, costs: Costs, verdict: Verdict) -> None:
    ends = {(each.step, each.action): each.end for each in verdict.timed}
    for each in verdict.timed:
        stage, microbatch = each.action.stage, each.action.microbatch
        match each.action.kind:
            case Kind.FORWARD if stage > 0:
                source, hop = Action(Kind.FORWARD, stage - 1, microbatch), stage - 1
            case Kind.BACKWARD if stage < schedule.stages - 1:
                source, hop = Action(Kind.BACKWARD, stage + 1, microbatch), stage
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
    "gpipe": (1.094, 1.109, 1.125, 1.156, 1.188, 1.281, 1.469),
    "eager-1f1b": (1.094, 1.109, 1.125, 1.156, 1.188, 1.688, 2.688),
    "window": (1.094, 1.109, 1.125, 1.156, 1.188, 1.281, 1.469),
}


@pytest.mark.parametrize("name", names())
def test_latency_stretches_a_step_as_the_catalogue_says(name: str) -> None:
    turns = 2 if name == "interleaved-1f1b" else 1
    stretch = []
    for latency in LATENCIES:
        window = window_for([latency] * 3, FORWARD, BACKWARD) if name == "window" else None
        costs = Costs.even(4 * turns, forward=FORWARD / turns, backward=BACKWARD / turns, latency=latency)
        stretch.append(round(check(make(name, looped(4, turns), 32, window=window), costs).span / 96, 3))
    assert tuple(stretch) == pytest.approx(STRETCH[name], abs=5e-4 + 1e-9)


def test_the_documented_stretches_are_these() -> None:
    page = (Path(__file__).parent.parent / "docs" / "schedules.md").read_text(encoding="utf-8")
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
    span = check(make("window", line(stages), microbatches, window=window), costs).span
    assert span == (microbatches + stages - 1) * 3 + 2 * latency * (stages - 1)
    smaller = (window[0] - 1, *window[1:])
    assert check(make("window", line(stages), microbatches, window=smaller), costs).span > span


def test_a_window_deadlocks_exactly_where_it_is_refused() -> None:
    for seed in range(300):
        random = Random(seed)
        stages, microbatches = random.randint(1, 4), random.randint(1, 6)
        window = [random.randint(1, 6) for _ in range(stages)]
        assert is_accepted(window, microbatches) == is_sound(unchecked(window, microbatches))


def is_accepted(window: list[int], microbatches: int) -> bool:
    try:
        make("window", line(len(window)), microbatches, window=window)
    except ScheduleRefused:
        return False
    return True


def unchecked(window: list[int], microbatches: int) -> Schedule:
    lists = tuple(
        (*(Action(*turn) for turn in alternate(stage, range(microbatches), peak - 1, 0)), Action(Kind.UPDATE, stage))
        for stage, peak in enumerate(window)
    )
    return Schedule("window", "sync", line(len(window)), microbatches, lists)


def is_sound(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except Unsound:
        return False
    return True


def test_a_hop_within_a_worker_takes_no_time() -> None:
    schedule = make("1f1b", ((0, 1),), 3)
    assert check(schedule, Costs.even(2, latency=100)).bubble == 0


def test_asynchronous_1f1b_has_no_bubble_once_it_is_warm() -> None:
    for stages in range(1, 6):
        verdict = check(make("1f1b", line(stages), 1, mode="async"), steps=40)
        assert verdict.span == (40 + stages - 1) * 3
        assert verdict.stage_peak == tuple(range(stages, 0, -1))


def test_without_a_number_of_steps_asynchronous_mode_runs_until_it_is_steady() -> None:
    schedule = make("1f1b", line(4), 1, mode="async")
    verdict = check(schedule)
    assert verdict.stage_peak == check(schedule, steps=40).stage_peak
    assert verdict.queue_bound == check(schedule, steps=40).queue_bound


def test_a_stage_that_does_not_train_holds_nothing() -> None:
    assert check(make("1f1b", line(3), 8, first_trainable=1)).stage_peak == (0, 2, 1)
    assert check(forward_only(((0, 2), (1,)), 8)).worker_peak == (0, 0)


def test_a_backward_may_be_split() -> None:
    verdict = check(
        written("0F0 0F1 0I0 0W0 0I1 0W1 0U", "1F0 1I0 1F1 1I1 1W0 1W1 1U", microbatches=2),
        Costs.even(2, forward=1, backward=2),
    )
    assert times(verdict, 0)["0I1"] == (5, 6)  # at once after 1I1, which did not wait for 1W0
    assert verdict.stage_peak == (2, 2)  # a microbatch is held until its W


def test_halves_and_whole_backwards_may_be_mixed() -> None:
    check(written("0F0 0B0 0F1 0I1 0W1 0U", microbatches=2))


@pytest.mark.parametrize(
    ("lists", "says"),
    [
        (("0F0 0U",), "worker 0 never runs 0B0 of step 0"),
        (("0F0 0B0",), "worker 0 never runs 0U of step 0"),
        (("0F0 0I0 0U",), "worker 0 never runs 0W0 of step 0"),
        (("0F0 0F0 0B0 0U",), "worker 0 runs 0F0 of step 0 more than once"),
        (("0F0 0B0 0I0 0W0 0U",), "worker 0 runs 0I0 of step 0 though it is none of its actions"),
        (("0F0 0F1 0B0 0U",), "worker 0 runs 0F1 of step 0 though it is none of its actions"),
        (("0F0 0B0 0U 1F0", "1F0 1B0 1U"), "worker 0 runs 1F0 of step 0 though it is none of its actions"),
    ],
)
def test_a_list_must_have_every_action_once_and_no_other(lists: tuple[str, ...], says: str) -> None:
    with pytest.raises(Incomplete, match=f"schedule by-hand: {says}"):
        check(written(*lists))


@pytest.mark.parametrize(
    ("lists", "says"),
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
def test_a_list_must_have_every_action_after_those_it_builds_on(lists: tuple[str, ...], says: str) -> None:
    with pytest.raises(Disordered, match=says):
        check(written(*lists, microbatches=2))


def test_a_step_must_end_before_the_next_begins() -> None:
    class Overlapping(Schedule):
        def program(self, worker: int, steps: range) -> Iterator[tuple[int, Action]]:
            return iter([(step, each) for each in self.workers[worker] for step in steps])

    schedule = make("gpipe", line(1), 1)
    overlapping = Overlapping(schedule.name, schedule.mode, schedule.placement, 1, schedule.workers)
    with pytest.raises(Disordered, match="0F0 of step 1 before 0U of step 0"):
        check(overlapping, steps=2)


def test_a_deadlock_says_who_waits_for_what() -> None:
    with pytest.raises(Deadlock) as refused:
        check(unchecked([1, 2], microbatches=2))
    assert str(refused.value) == (
        "schedule window deadlocks: worker 0 waits at 0B0 of step 0 for the gradient from stage 1 on worker 1; "
        "worker 1 waits at 1F1 of step 0 for the activation from stage 0 on worker 0"
    )


def test_a_worker_that_has_its_stages_the_wrong_way_round_waits_for_itself() -> None:
    lists = (tuple(map(Action.parse, ["1F0", "0F0", "1B0", "0B0", "0U", "1U"])),)
    with pytest.raises(Deadlock, match="worker 0 waits at 1F0 of step 0 for the activation from stage 0 on worker 0"):
        check(Schedule("by-hand", "sync", ((0, 1),), 1, lists))


def test_a_window_that_is_too_small_for_a_long_warm_up_deadlocks() -> None:
    schedule = make("window", line(2), 16, window=(8, 1))
    free = check(schedule)
    assert check(schedule, windows=dict.fromkeys(free.queue_bound, 4)).span >= free.span
    with pytest.raises(Deadlock, match=r"worker 0 waits at 0F7 of step 0 for room in forward-1, .* taken 4 messages"):
        check(schedule, windows=dict.fromkeys(free.queue_bound, 3))


def test_room_in_a_window_is_known_a_latency_after_it_was_made() -> None:
    verdict = check(make("gpipe", line(2), 2), Costs.even(2, latency=5), windows={"forward-1": 1})
    assert times(verdict, 0)["0F1"] == (1, 2)
    assert times(verdict, 1)["1F0"] == (6, 7)
    assert times(verdict, 1)["1F1"] == (16, 17)  # put at 11, when stage 0 hears that 1F0 was taken at 6


@pytest.mark.parametrize("name", names()[:3])
def test_windows_of_the_queue_bound_never_make_a_worker_wait(name: str) -> None:
    for seed in range(40):
        stages, microbatches = 1 + seed % 6, 1 + 3 * seed % 16
        schedule = make(name, scattered(stages, seed), microbatches)
        costs = Costs(*random_costs(seed, stages))
        free = check(schedule, costs, steps=2)
        assert check(schedule, costs, steps=2, windows=free.queue_bound) == free


@pytest.mark.parametrize("name", names()[:3])
def test_a_slow_hop_fills_its_queue_to_the_bound(name: str) -> None:
    for stages in range(2, 6):
        schedule = make(name, line(stages), 16)
        for hop in range(stages - 1):
            slow = tuple(1000.0 if each == hop else 0 for each in range(stages - 1))
            verdict = check(schedule, replace(Costs.even(stages), latency=slow))
            assert most_waiting(verdict, Kind.FORWARD, hop + 1) == verdict.queue_bound[f"forward-{hop + 1}"]


def most_waiting(verdict: Verdict, kind: Kind, consumer: int) -> int:
    producer = consumer - 1 if kind is Kind.FORWARD else consumer + 1
    puts = [(each.end, 1) for each in verdict.timed if (each.action.kind, each.action.stage) == (kind, producer)]
    takes = [(each.start, -1) for each in verdict.timed if (each.action.kind, each.action.stage) == (kind, consumer)]
    return max(accumulate(change for _, change in sorted(puts + takes, key=lambda event: (event[0], -event[1]))))


@given(st.integers(0, 10**6), st.sampled_from(names()[:3]))
def test_no_costs_put_more_into_a_queue_than_its_bound(seed: int, name: str) -> None:
    stages = 2 + seed % 4
    schedule = make(name, scattered(stages, seed), 1 + seed % 9)
    verdict = check(schedule, Costs(*random_costs(seed, stages)), steps=2)
    for queue, bound in verdict.queue_bound.items():
        flow, consumer = queue.split("-")
        assert most_waiting(verdict, Kind.FORWARD if flow == "forward" else Kind.BACKWARD, int(consumer)) <= bound
