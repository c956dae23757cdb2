"""The times of a finished step's actions: they come back with the actions that the worker ran."""

import pytest

from stageline.broker.control.records import StepRecord
from stageline.broker.ledger.times import timed_actions
from stageline.pipeline.schedule import Action, Kind
from support.packed import packed_times


def test_every_kind_of_action_comes_back_in_the_order_in_which_it_ran() -> None:
    ran = [(Action(kind, 3, number * 9_999), 0.5 * number, 0.5 * number + 0.1) for number, kind in enumerate(Kind)]
    assert timed_actions(StepRecord(3, 7, packed_times(ran))) == ran


@pytest.mark.parametrize("times", [b"", bytes(20), bytes(16 * 21)], ids=["not measured", "part", "without kinds"])
def test_times_that_name_no_actions_are_none(times: bytes) -> None:
    assert timed_actions(StepRecord(0, 7, times)) == []
