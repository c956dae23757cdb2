"""GPipe, 1F1B, eager 1F1B and windows: a picture of each, torch's own lists, and the smallest window for a latency."""

from typing import Any

import pytest

from stageline.pipeline.schedule import (
    Kind,
    Schedule,
    make_schedule,
    window_for,
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


def torch_order(kind: str, stages: int, microbatches: int) -> dict[int, list[Any]]:
    from torch.distributed.pipelining import schedules  # which takes seconds to load

    schedule: Any = object.__new__(getattr(schedules, kind))  # its own constructor wants a process group
    schedule._num_stages, schedule._n_microbatches = stages, microbatches
    order: dict[int, list[Any]] = schedule._get_pipeline_order()
    return order


@pytest.mark.parametrize("stages", range(1, 6))
def test_gpipe_is_torchs(stages: int) -> None:
    for schedule in accepted("gpipe", line(stages), 16):
        order = torch_order("ScheduleGPipe", stages, schedule.microbatches)
        for worker in range(stages):
            assert ours(schedule, worker) == torchs(order[worker])


@pytest.mark.parametrize("stages", range(2, 6))
def test_one_f_one_b_is_torchs_but_for_the_last_rank_which_torch_has_wrong(stages: int) -> None:
    for microbatches in range(stages, 17):
        schedule = make_schedule("1f1b", line(stages), microbatches)
        order = torch_order("Schedule1F1B", stages, microbatches)
        for worker in range(stages - 1):
            assert ours(schedule, worker) == torchs(order[worker])


def lists(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule.workers]


def test_a_window_is_how_many_each_stage_has_in_flight() -> None:
    assert drawn(make_schedule("window", line(2), 6, window=(4, 1))) == picture("""
        F0 F1 F2 F3 B0 == F4 B1 == F5 B2 == .. B3 == .. B4 == .. B5 ==
        .. F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == F5 B5 ==
    """)


def test_window_for_gives_the_known_windows_at_their_latencies() -> None:
    assert window_for([0, 0, 0], forward=1, backward=2) == (4, 3, 2, 1)
    assert window_for([1.5, 1.5, 1.5], forward=1, backward=2) == (7, 5, 3, 1)
    assert [window_for([c] * 3, 1, 2)[0] for c in (0, 0.25, 0.5, 1, 1.5, 3, 6)] == [4, 7, 7, 7, 7, 10, 16]
    assert window_for([3, 0], forward=1, backward=2) == (5, 2, 1)
    assert window_for([], forward=1, backward=2) == (1,)


def test_rounding_costs_no_microbatch() -> None:
    assert 1 + 2 * 0.8 / (0.1 + 0.7) > 3
    assert window_for([0.8], forward=0.1, backward=0.7) == (4, 1)


@pytest.mark.parametrize(("latencies", "forward"), [([1], 0), ([-1], 1)])
def test_window_for_wants_stages_that_take_time(latencies: list[float], forward: float) -> None:
    with pytest.raises(ValueError, match="stages must take time"):
        window_for(latencies, forward, 0)


def test_a_window_is_cut_to_the_microbatches_there_are() -> None:
    assert make_schedule("window", line(2), 3, window=(3, 9)).workers == make_schedule("gpipe", line(2), 3).workers


def test_a_window_of_an_untrained_stage_means_nothing() -> None:
    schedule = make_schedule("window", line(2), 3, window=(1, 3), first_trainable=1)
    assert lists(schedule) == ["0F0 0F1 0F2 0U", "1F0 1F1 1F2 1B0 1B1 1B2 1U"]
