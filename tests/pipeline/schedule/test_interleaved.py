"""Interleaved 1F1B: a picture, and torch's own lists."""

from typing import Any

import pytest

from stageline.pipeline.schedule import (
    Kind,
    Schedule,
    make_schedule,
)
from support.shapes import accepted, drawn, looped


def picture(text: str) -> str:
    return "\n".join(row.strip() for row in text.strip().splitlines())


def test_interleaving_sends_groups_round_the_workers() -> None:
    first, second = picture("""
        0F0 0F1 2F0 2F1 0F2 ... 2B0 === 0F3 2B1 === 2F2 0B0 === 2F3 0B1 === ... 2B2 === ... 2B3 === 0B2 === 0B3 ===
        ... 1F0 1F1 3F0 3B0 === 3F1 3B1 === 1F2 1B0 === 1F3 1B1 === 3F2 3B2 === 3F3 3B3 === 1B2 === 1B3 ===
    """).splitlines()
    assert drawn(make_schedule("interleaved-1f1b", looped(2, 2), 4)).splitlines() == [first, second]


def ours(schedule: Schedule, worker: int) -> list[str]:
    return [str(action) for action in schedule.workers[worker] if action.kind is not Kind.UPDATE]


def torchs(order: list[Any]) -> list[str]:
    """torch's compute-only list without its padding and the reduction at its end."""
    return [str(action) for action in order if action is not None and action.microbatch_index is not None]


def torch_interleaved(worker: int, schedule: Schedule) -> list[Any]:
    from torch.distributed.pipelining import schedules  # which takes seconds to load

    workers = len(schedule.placement)
    theirs: Any = object.__new__(schedules.ScheduleInterleaved1F1B)
    theirs.pp_group_size, theirs.n_local_stages = workers, schedule.stages // workers
    theirs._n_microbatches = schedule.microbatches
    theirs.microbatches_per_round = schedule.microbatches // max(1, schedule.microbatches // workers)
    order: list[Any] = theirs._calculate_single_rank_operations(worker)
    return order


@pytest.mark.parametrize("workers", range(1, 6))
@pytest.mark.parametrize("turns", range(1, 5))
def test_interleaving_is_torchs(workers: int, turns: int) -> None:
    for schedule in accepted("interleaved-1f1b", looped(workers, turns), 16):
        for worker in range(workers):
            assert ours(schedule, worker) == torchs(torch_interleaved(worker, schedule))


def test_interleaving_accepts_the_numbers_that_divide_into_groups() -> None:
    numbers = [schedule.microbatches for schedule in accepted("interleaved-1f1b", looped(4, 2), 16)]
    assert numbers == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16]
