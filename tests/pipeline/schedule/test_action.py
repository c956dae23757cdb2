"""Actions as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.pipeline.schedule import (
    Action,
    Kind,
)


@given(st.builds(Action, st.sampled_from("FBIW").map(Kind), st.integers(0, 99), st.integers(0, 9999)))
def test_an_action_reads_what_it_writes(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_actions_are_written_with_stage_kind_and_microbatch() -> None:
    assert str(Action(Kind.FORWARD, 2, 0)) == "2F0"
    assert str(Action(Kind.UPDATE, 2)) == "2U"
    assert Action.parse("2U") == Action(Kind.UPDATE, 2)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2U3", "-1F0", "2F0 ", "٢F0"])
def test_what_is_not_an_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="written like 2F0"):
        Action.parse(text)
