"""Schedules over a V: torch's own lists, their bubbles and their memory, and what is refused."""

from typing import Any

import pytest

from stageline.pipeline.program import Costs, check_schedule
from stageline.pipeline.schedule import Kind, Schedule, ScheduleRefused, make_schedule, v_shaped
from support.shapes import accepted, drawn, line

WORKERS = range(1, 7)


def each_stage(stages: int, forward: float, inwards: float, weights: float) -> Costs:
    return Costs((forward,) * stages, (inwards,) * stages, (weights,) * stages, (0,) * stages, (0,) * (stages - 1))


def ours(schedule: Schedule, worker: int) -> list[str]:
    return [str(action) for action in schedule.workers[worker] if action.kind is not Kind.UPDATE]


def torchs(name: str, schedule: Schedule, worker: int) -> list[str]:
    """torch's compute-only list without its padding; of a forward and a backward that it overlaps, first one."""
    from torch.distributed.pipelining import schedules  # which takes seconds to load

    theirs: Any = object.__new__(getattr(schedules, name))
    theirs.pp_group_size, theirs.num_stages = len(schedule.placement), schedule.stages
    theirs._n_microbatches = schedule.microbatches
    order = theirs._calculate_single_rank_operations(worker)
    return [str(part) for each in order if each is not None for part in each.sub_actions or (each,)]


def test_a_microbatch_goes_down_the_workers_and_up_again() -> None:
    assert [row.strip() for row in drawn(make_schedule("zb-v", v_shaped(2), 3)).splitlines()] == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "... 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("name", "theirs"), [("zb-v", "ScheduleZBVZeroBubble"), ("dualpipe-v", "ScheduleDualPipeV")])
def test_the_lists_are_torchs(name: str, theirs: str, workers: int) -> None:
    found = list(accepted(name, v_shaped(workers), 16))
    assert [schedule.microbatches for schedule in found] == list(range(2 * workers if name != "zb-v" else 1, 17))
    for schedule in found:
        for worker in range(workers):
            assert ours(schedule, worker) == torchs(theirs, schedule, worker)


@pytest.mark.parametrize("workers", WORKERS)
def test_zb_v_has_no_bubble_but_the_way_down_and_equally_much_memory_everywhere(workers: int) -> None:
    for microbatches in range(2 * workers - 1, 25):
        verdict = check_schedule(
            make_schedule("zb-v", v_shaped(workers), microbatches), each_stage(2 * workers, 1, 1, 1)
        )
        assert verdict.bubble == workers - 1
        assert verdict.worker_peak == (2 * workers,) * workers  # as many half stages as 1F1B holds on the first worker


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("forward", "inwards", "weights"), [(1, 1, 1), (2, 2, 1), (3, 2, 2), (4, 3, 2)])
def test_dualpipe_v_has_the_bubble_and_the_memory_of_the_catalogue(
    workers: int, forward: float, inwards: float, weights: float
) -> None:
    for schedule in accepted("dualpipe-v", v_shaped(workers), 24):
        verdict = check_schedule(schedule, each_stage(2 * workers, forward, inwards, weights))
        assert verdict.bubble == (workers - 1) * (forward + inwards - weights)
        assert verdict.worker_peak == (2 * workers + 1,) * workers


TIMES = [
    (1, 1.5, 0.5),
    *(pytest.param(times, marks=pytest.mark.slow) for times in [(1, 1.2, 0.8), (1, 2, 1), (1, 1, 2)]),
]
TIMES += [(2, 1, 1), (3, 4, 2)]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("times", TIMES)
def test_unequal_times_give_a_step_that_is_no_longer_in_no_more_memory(
    times: tuple[float, float, float], workers: int
) -> None:
    costs, shorter = each_stage(2 * workers, *times), []
    for microbatches in (1, 2, 5, 8, 16):
        listed = check_schedule(make_schedule("zb-v", v_shaped(workers), microbatches), costs)
        searched = check_schedule(make_schedule("zb-v", v_shaped(workers), microbatches, times=times), costs)
        assert searched.span <= listed.span
        assert max(searched.worker_peak) <= 2 * workers
        shorter.append(searched.span < listed.span)
    assert any(shorter) or workers == 1 or times not in ((1, 1.5, 0.5), (1, 1, 2))


@pytest.mark.parametrize("first_trainable", range(7))
def test_frozen_stages_are_on_the_way_down_or_up(first_trainable: int) -> None:
    for name, times in (("zb-v", None), ("zb-v", (1, 1.5, 0.5)), ("dualpipe-v", None)):
        schedule = make_schedule(name, v_shaped(3), 8, times=times, first_trainable=first_trainable)
        verdict = check_schedule(schedule, steps=2)
        assert [verdict.stage_peak[stage] > 0 for stage in range(6)] == [stage >= first_trainable for stage in range(6)]


@pytest.mark.parametrize(
    ("arguments", "options", "reason"),
    [
        (("zb-v", line(4), 8), {}, "must form a V .* use two stages for each worker, or use zb-h1"),
        (("dualpipe-v", ((0, 2), (1, 3)), 8), {}, r"place the stages as \[\[0, 3\], \[1, 2\]\]"),
        (("dualpipe-v", v_shaped(3), 5), {}, "two microbatches for each worker.*; use 6 or more, or zb-v"),
        (("zb-h1", line(3), 5), {"times": (1, 1, 2)}, 'times are for the schedule "zb-v" alone'),
        (("zb-v", v_shaped(3), 5), {"times": (1, 0, 2)}, "must take some time, and are given as 1, 0, 2"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Any, ...], options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ScheduleRefused, match=reason):
        make_schedule(*arguments, **options)
