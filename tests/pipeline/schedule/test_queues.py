"""The queues between stages, and the actions that touch them."""

import pytest

from stageline.pipeline.schedule import make_schedule
from stageline.pipeline.schedule.queues import hops, inbound, outbound
from support.shapes import line, parsed


def test_every_hop_has_a_queue_for_activations_and_one_for_gradients_that_are_wanted() -> None:
    assert hops(make_schedule("1f1b", line(3), 2)) == {"forward-1": 0, "forward-2": 1, "backward-0": 0, "backward-1": 1}
    assert "backward-0" not in hops(make_schedule("1f1b", line(3), 2, first_trainable=1))


@pytest.mark.parametrize(
    ("action", "takes", "gives"),
    [("1F0", "forward-1", "forward-2"), ("1B0", "backward-1", "backward-0"), ("1U", "", "")],
)
def test_what_one_stage_puts_into_a_queue_the_next_one_takes_from_it(action: str, takes: str, gives: str) -> None:
    assert (inbound(parsed(action)), outbound(parsed(action))) == (takes, gives)
