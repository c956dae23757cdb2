"""Actions as text."""

import pytest

from stageline.pipeline.schedule import Action, Kind


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
