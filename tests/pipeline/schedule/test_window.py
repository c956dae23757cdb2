"""Windows: the smallest that hides a latency, and those that are given."""

import pytest

from stageline.pipeline.schedule import (
    Schedule,
    make_schedule,
    window_for,
)
from support.shapes import drawn, line


def picture(text: str) -> str:
    return "\n".join(row.strip() for row in text.strip().splitlines())


def lists(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule.workers]


def test_a_window_says_how_many_each_stage_has_in_flight() -> None:
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
