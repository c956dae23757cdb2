"""Looped breadth-first: a picture, torch's own lists, its bubble and its memory."""

from typing import Any

import pytest

from stageline.pipeline.program import Costs, check_schedule
from stageline.pipeline.schedule import Action, Kind, Schedule, ScheduleRefused, make_schedule
from support.shapes import accepted, drawn, looped

SHAPES = [(workers, turns) for workers in range(1, 6) for turns in range(1, 5)]


def test_each_stage_runs_all_microbatches_before_the_workers_next_one() -> None:
    first = "0F0 0F1 2F0 2F1 ... ... ... 2B0 === 2B1 === 0B0 === 0B1 ==="
    second = "... 1F0 1F1 3F0 3F1 3B0 === 3B1 === 1B0 === 1B1 ==="
    assert [row.strip() for row in drawn(make_schedule("looped-bfs", looped(2, 2), 2)).splitlines()] == [first, second]


def torchs(worker: int, schedule: Schedule) -> list[str]:
    """torch's list, with each stage's backwards in ascending order."""
    from torch.distributed.pipelining import schedules  # which takes seconds to load

    theirs: Any = object.__new__(schedules.ScheduleLoopedBFS)
    theirs.pp_group_size, theirs._stages = len(schedule.placement), schedule.placement[worker]
    theirs._n_microbatches = schedule.microbatches
    order = [each for each in theirs._calculate_single_rank_operations(worker) if each is not None]
    forward = [str(each) for each in order if "F" in str(each)]
    backward = [each for each in order if "B" in str(each)]
    stages = list(dict.fromkeys(each.stage_index for each in backward))
    ascending = [f"{stage}B{number}" for stage in stages for number in range(schedule.microbatches)]
    assert sorted(ascending) == sorted(f"{each.stage_index}B{each.microbatch_index}" for each in backward)
    return [*forward, *ascending]


@pytest.mark.parametrize(("workers", "turns"), SHAPES)
def test_the_lists_are_torchs_but_for_the_order_of_backwards(workers: int, turns: int) -> None:
    for schedule in accepted("looped-bfs", looped(workers, turns), 9):
        for worker in range(workers):
            ours = [str(each) for each in schedule.workers[worker] if each.kind is not Kind.UPDATE]
            assert ours == torchs(worker, schedule)


@pytest.mark.parametrize(("workers", "turns"), SHAPES)
def test_the_bubble_is_that_of_interleaving_and_the_memory_that_of_gpipe(workers: int, turns: int) -> None:
    found = list(accepted("looped-bfs", looped(workers, turns), 16))
    assert [schedule.microbatches for schedule in found] == list(range(1, 17))
    for schedule in found:
        verdict = check_schedule(schedule, Costs.even(workers * turns))
        if schedule.microbatches >= workers:
            assert verdict.bubble == (workers - 1) * 3  # in units of a stage, of which a worker has `turns`
        assert verdict.worker_peak == (turns * schedule.microbatches,) * workers


def test_stages_that_do_not_train_run_no_backward() -> None:
    schedule = make_schedule("looped-bfs", looped(2, 2), 2, first_trainable=2)
    assert [str(each) for each in schedule.workers[1]] == ["1F0", "1F1", "3F0", "3F1", "3B0", "3B1", "1U", "3U"]
    assert Action(Kind.BACKWARD, 0, 0) not in schedule.workers[0]
    check_schedule(schedule)


def test_stages_in_blocks_are_refused_with_the_placement_that_works() -> None:
    with pytest.raises(ScheduleRefused, match=r"looped-bfs .* place the stages as \[\[0, 2\], \[1, 3\]\]"):
        make_schedule("looped-bfs", ((0, 1), (2, 3)), 4)
