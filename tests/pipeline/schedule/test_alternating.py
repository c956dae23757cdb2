"""GPipe, 1F1B and eager 1F1B: a picture of each, and torch's own lists."""

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from stageline.pipeline.schedule import (
    Kind,
    Schedule,
    make_schedule,
)
from support.shapes import accepted, drawn, line


def picture(text: str) -> str:
    return "\n".join(row.strip() for row in text.strip().splitlines())


def test_gpipe_runs_all_forwards_and_then_all_backwards() -> None:
    assert drawn(make_schedule("gpipe", line(3), 3)) == picture("""
        F0 F1 F2 .. .. .. .. .. .. B0 == B1 == B2 ==
        .. F0 F1 F2 .. .. .. B0 == B1 == B2 ==
        .. .. F0 F1 F2 B0 == B1 == B2 ==
    """)


def test_one_f_one_b_has_as_many_in_flight_as_there_are_stages_from_here_on() -> None:
    assert drawn(make_schedule("1f1b", line(4), 6)) == picture("""
        F0 F1 F2 F3 .. .. .. .. .. .. B0 == F4 B1 == F5 B2 == .. B3 == .. B4 == .. B5 ==
        .. F0 F1 F2 .. .. .. .. B0 == F3 B1 == F4 B2 == F5 B3 == .. B4 == .. B5 ==
        .. .. F0 F1 .. .. B0 == F2 B1 == F3 B2 == F4 B3 == F5 B4 == .. B5 ==
        .. .. .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == F5 B5 ==
    """)


def test_one_f_one_b_needs_no_more_microbatches_than_one() -> None:
    assert drawn(make_schedule("1f1b", line(4), 2)) == picture("""
        F0 F1 .. .. .. .. .. .. .. .. B0 == .. B1 ==
        .. F0 F1 .. .. .. .. .. B0 == .. B1 ==
        .. .. F0 F1 .. .. B0 == .. B1 ==
        .. .. .. F0 B0 == F1 B1 ==
    """)


def test_eager_1f1b_warms_up_twice_as_long() -> None:
    assert drawn(make_schedule("eager-1f1b", line(3), 6)) == picture("""
        F0 F1 F2 F3 F4 .. .. B0 == F5 B1 == .. B2 == .. B3 == .. B4 == .. B5 ==
        .. F0 F1 F2 .. B0 == F3 B1 == F4 B2 == F5 B3 == .. B4 == .. B5 ==
        .. .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == F5 B5 ==
    """)


def ours(schedule: Schedule, worker: int) -> list[str]:
    return [str(action) for action in schedule.workers[worker] if action.kind is not Kind.UPDATE]


def torchs(order: list[Any]) -> list[str]:
    """torch's compute-only list without its padding and the reduction at its end."""
    return [str(action) for action in order if action is not None and action.microbatch_index is not None]


def torch_order(kind: type, stages: int, microbatches: int) -> dict[int, list[Any]]:
    schedule = object.__new__(kind)  # its own constructor wants a process group
    schedule._num_stages, schedule._n_microbatches = stages, microbatches
    order: dict[int, list[Any]] = schedule._get_pipeline_order()
    return order


@pytest.mark.parametrize("stages", range(1, 6))
def test_gpipe_is_torchs(stages: int) -> None:
    for schedule in accepted("gpipe", line(stages), 16):
        order = torch_order(torch_schedules.ScheduleGPipe, stages, schedule.microbatches)
        for worker in range(stages):
            assert ours(schedule, worker) == torchs(order[worker])


@pytest.mark.parametrize("stages", range(2, 6))
def test_one_f_one_b_is_torchs_but_for_the_last_rank_which_torch_has_wrong(stages: int) -> None:
    for microbatches in range(stages, 17):
        schedule = make_schedule("1f1b", line(stages), microbatches)
        order = torch_order(torch_schedules.Schedule1F1B, stages, microbatches)
        for worker in range(stages - 1):
            assert ours(schedule, worker) == torchs(order[worker])
