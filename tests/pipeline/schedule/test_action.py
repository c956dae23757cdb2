"""Actions as text, and the queues that they take from and put into."""

import pytest

from stageline.pipeline.schedule import Action, Kind
from support.shapes import parsed


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(Kind.FORWARD, 2, 0), "2F0"),
        (Action(Kind.BACKWARD, 10, 31), "10B31"),
        (Action(Kind.INPUT, 0, 1), "0I1"),
        (Action(Kind.WEIGHT, 0, 1), "0W1"),
        (Action(Kind.UPDATE, 2), "2U"),
    ],
)
def test_an_action_is_written_with_stage_kind_and_microbatch(action: Action, text: str) -> None:
    assert str(action) == text


@pytest.mark.parametrize(
    ("action", "takes", "gives"),
    [("1F0", "forward-1", "forward-2"), ("1B0", "backward-1", "backward-0"), ("1U", "", "")],
)
def test_what_one_stage_puts_into_a_queue_the_next_one_takes_from_it(action: str, takes: str, gives: str) -> None:
    assert (parsed(action).inbound, parsed(action).outbound) == (takes, gives)
