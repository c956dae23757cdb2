"""Costs and windows must be for the queues that a schedule has."""

from dataclasses import replace

import pytest

from stageline.pipeline.schedule import make_schedule
from stageline.pipeline.schedule.check import Costs, check_schedule
from support.shapes import line


def test_costs_must_be_for_the_stages_there_are() -> None:
    with pytest.raises(ValueError, match="schedule 1f1b has 3 stages, and the costs are for 2"):
        check_schedule(make_schedule("1f1b", line(3), 2), Costs.even(2))
    with pytest.raises(ValueError, match=r"update have \[2, 2, 2, 2\], latency has 2"):
        replace(Costs.even(2), latency=(1, 1))


@pytest.mark.parametrize(
    ("windows", "says"),
    [
        ({"forward-2": 1}, "a window for forward-2, and the only queues are: forward-1, backward-0"),
        ({"forward-1": 0}, "the window of forward-1 is 0"),
    ],
)
def test_windows_must_be_for_the_queues_there_are(windows: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_schedule(make_schedule("1f1b", line(2), 2), windows=windows)
