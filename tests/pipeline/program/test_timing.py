"""Workers that wait for each other: deadlocks, windows, and how much a queue must hold."""

from dataclasses import replace
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.pipeline.program import Costs, Deadlock, UnsoundSchedule, Verdict, check_schedule
from stageline.pipeline.schedule import Action, Kind, Schedule, ScheduleRefused, make_schedule, schedule_names
from stageline.pipeline.schedule.alternating import alternate
from support.shapes import line, parsed, random_costs, scattered, times


def unchecked(window: list[int], microbatches: int) -> Schedule:
    lists = tuple(
        (*(Action(*turn) for turn in alternate(stage, range(microbatches), peak - 1)), Action(Kind.UPDATE, stage))
        for stage, peak in enumerate(window)
    )
    return Schedule("window", "sync", line(len(window)), microbatches, lists)


def test_a_deadlock_names_what_each_worker_waits_for() -> None:
    with pytest.raises(Deadlock) as refused:
        check_schedule(unchecked([1, 2], microbatches=2))
    assert str(refused.value) == (
        "schedule window deadlocks: worker 0 waits at 0B0 of step 0 for the gradient from stage 1 on worker 1; "
        "worker 1 waits at 1F1 of step 0 for the activation from stage 0 on worker 0 [SL106]"
    )


def test_a_worker_that_has_its_stages_the_wrong_way_round_waits_for_itself() -> None:
    lists = (tuple(map(parsed, ["1F0", "0F0", "1B0", "0B0", "0U", "1U"])),)
    with pytest.raises(Deadlock, match="worker 0 waits at 1F0 of step 0 for the activation from stage 0 on worker 0"):
        check_schedule(Schedule("by-hand", "sync", ((0, 1),), 1, lists))


def test_a_window_that_is_too_small_for_a_long_warm_up_deadlocks() -> None:
    schedule = make_schedule("window", line(2), 16, window=(8, 1))
    free = check_schedule(schedule)
    assert check_schedule(schedule, windows=dict.fromkeys(free.queue_bound, 4)).span >= free.span
    with pytest.raises(Deadlock, match=r"worker 0 waits at 0F7 of step 0 for room in forward-1, .* taken 4 messages"):
        check_schedule(schedule, windows=dict.fromkeys(free.queue_bound, 3))


def test_room_in_a_window_is_known_a_latency_after_it_was_made() -> None:
    verdict = check_schedule(make_schedule("gpipe", line(2), 2), Costs.even(2, latency=5), windows={"forward-1": 1})
    assert times(verdict, 0)["0F1"] == (1, 2)
    assert times(verdict, 1)["1F0"] == (6, 7)
    assert times(verdict, 1)["1F1"] == (16, 17)  # put at 11, when stage 0 learns that 1F0 was taken at 6


def test_no_queue_holds_more_than_its_window() -> None:
    bound = check_schedule(make_schedule("gpipe", line(3), 8), windows={"forward-1": 2, "backward-1": 3}).queue_bound
    assert bound == {"forward-1": 2, "forward-2": 8, "backward-0": 8, "backward-1": 3}


@pytest.mark.parametrize("name", schedule_names()[:3])
def test_windows_of_the_queue_bound_never_make_a_worker_wait(name: str) -> None:
    for seed in range(40):
        stages, microbatches = 1 + seed % 6, 1 + 3 * seed % 16
        schedule = make_schedule(name, scattered(stages, seed), microbatches)
        costs = random_costs(seed, stages)
        free = check_schedule(schedule, costs, steps=2)
        assert check_schedule(schedule, costs, steps=2, windows=free.queue_bound) == free


@pytest.mark.parametrize("name", schedule_names()[:3])
def test_a_slow_hop_fills_its_queue_to_the_bound(name: str) -> None:
    for stages in range(2, 6):
        schedule = make_schedule(name, line(stages), 16)
        for hop in range(stages - 1):
            slow = tuple(1000.0 if each == hop else 0 for each in range(stages - 1))
            verdict = check_schedule(schedule, replace(Costs.even(stages), latency=slow))
            assert most_waiting(verdict, Kind.FORWARD, hop + 1) == verdict.queue_bound[f"forward-{hop + 1}"]


def most_waiting(verdict: Verdict, kind: Kind, consumer: int) -> int:
    producer = consumer - 1 if kind is Kind.FORWARD else consumer + 1
    puts = [(each.end, 1) for each in verdict.timed if (each.action.kind, each.action.stage) == (kind, producer)]
    takes = [(each.start, -1) for each in verdict.timed if (each.action.kind, each.action.stage) == (kind, consumer)]
    return max(accumulate(change for _, change in sorted(puts + takes, key=lambda event: (event[0], -event[1]))))


@given(st.integers(0, 10**6), st.sampled_from(schedule_names()[:3]))
def test_no_costs_put_more_into_a_queue_than_its_bound(seed: int, name: str) -> None:
    stages = 2 + seed % 4
    schedule = make_schedule(name, scattered(stages, seed), 1 + seed % 9)
    verdict = check_schedule(schedule, random_costs(seed, stages), steps=2)
    for queue, bound in verdict.queue_bound.items():
        flow, consumer = queue.split("-")
        assert most_waiting(verdict, Kind.FORWARD if flow == "forward" else Kind.BACKWARD, int(consumer)) <= bound


def test_a_window_deadlocks_exactly_where_it_is_refused() -> None:
    for seed in range(300):
        random = Random(seed)
        stages, microbatches = random.randint(1, 4), random.randint(1, 6)
        window = [random.randint(1, 6) for _ in range(stages)]
        assert is_accepted(window, microbatches) == is_sound(unchecked(window, microbatches))


def is_accepted(window: list[int], microbatches: int) -> bool:
    try:
        make_schedule("window", line(len(window)), microbatches, window=window)
    except ScheduleRefused:
        return False
    return True


def is_sound(schedule: Schedule) -> bool:
    try:
        check_schedule(schedule)
    except UnsoundSchedule:
        return False
    return True


def test_costs_must_be_for_the_stages_there_are() -> None:
    with pytest.raises(ValueError, match="schedule 1f1b has 3 stages, and the costs are for 2"):
        check_schedule(make_schedule("1f1b", line(3), 2), Costs.even(2))
    with pytest.raises(ValueError, match=r"update have \[2, 2, 2, 2\], latency has 2"):
        replace(Costs.even(2), latency=(1, 1))


@pytest.mark.parametrize(
    ("windows", "reason"),
    [
        ({"forward-2": 1}, "a window for forward-2, and the only queues are: forward-1, backward-0"),
        ({"forward-1": 0}, "the window of forward-1 is 0"),
    ],
)
def test_windows_must_be_for_the_queues_there_are(windows: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_schedule(make_schedule("1f1b", line(2), 2), windows=windows)
