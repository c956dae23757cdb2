"""The lists of stages with replicas: complete, free of deadlock whatever actions cost, and worth the workers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.pipeline.program import Costs, Program, SumExchange, check_schedule, compile_program
from stageline.pipeline.schedule import Schedule, ScheduleRefused, make_schedule
from stageline.pipeline.schedule.replicas import NAMES


def summed(schedule: Schedule) -> Program:
    return compile_program(schedule, [SumExchange()])


def own_workers(shares: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    return [(copy,) for copy in range(sum(map(len, shares)))]


def dealt_to(workers: int, copies: int, seed: int) -> list[tuple[int, ...]]:
    """The copies on so many workers, by chance."""
    order = random.Random(seed).sample(range(copies), copies)
    return [tuple(order[worker::workers]) for worker in range(workers)]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    shares = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4))
    copies = sum(map(len, shares))
    placement = dealt_to(draw(st.integers(1, copies)), copies, draw(st.integers(0, 99)))
    name, microbatches = draw(st.sampled_from(NAMES)), draw(st.integers(9, 20))
    window = draw(st.lists(st.integers(1, 9), min_size=len(shares), max_size=len(shares)))
    more = {"window": window} if name == "window" else {}
    first = draw(st.integers(0, len(shares) - 1))
    shape = tuple(shares) if copies > len(shares) else ((1, 1), *shares[1:])
    if copies == len(shares):
        placement = [*placement, (copies,)]
    return make_schedule(name, placement, microbatches, shares=shape, first_trainable=first, **more)


@given(schedules(), st.integers(0, 10**6))
def test_no_worker_waits_for_ever_whatever_actions_and_messages_cost(schedule: Schedule, seed: int) -> None:
    draw, stages = random.Random(seed), schedule.stages
    times = [tuple(draw.choice((0.0, 1.0, draw.random() * 9)) for _ in range(stages)) for _ in range(5)]
    costs = Costs(*times[:4], latency=times[4][1:])
    bounds = check_schedule(summed(schedule), costs, steps=3).queue_bound  # raises `UnsoundSchedule`
    check_schedule(summed(schedule), costs, steps=3, windows={name: max(1, most) for name, most in bounds.items()})


def test_replicas_of_one_stage_alternate() -> None:
    schedule = make_schedule("1f1b", own_workers(((1,), (1, 1))), 4, shares=((1,), (1, 1)))
    assert [" ".join(op.name for op in ops) for ops in summed(schedule).step] == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0U",
        "1.0F0 1.0B0 1.0F2 1.0B2 1.0A 1.0U",
        "1.1F1 1.1B1 1.1F3 1.1B3 1.1A 1.1U",
    ]


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "gpipe"])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_of_a_slow_stage_make_the_line_nearly_as_much_faster(name: str, where: int, replicas: int) -> None:
    shares = tuple((1,) * replicas if stage == where else (1,) for stage in range(3))
    slow = tuple(float(replicas) if stage == where else 1.0 for stage in range(3))
    costs = Costs(slow, slow, slow, update=(0.0,) * 3, latency=(0.0,) * 2)
    alone = check_schedule(make_schedule(name, own_workers(((1,),) * 3), 48), costs).span
    together = check_schedule(make_schedule(name, own_workers(shares), 48, shares=shares), costs).span
    assert alone / together >= 0.9 * replicas


def test_a_group_without_microbatches_is_refused() -> None:
    with pytest.raises(ScheduleRefused, match=r"stage 1\.1 has no microbatch: shares \[9, 1\] deal 2"):
        make_schedule("1f1b", own_workers(((1,), (9, 1))), 2, shares=((1,), (9, 1)))
