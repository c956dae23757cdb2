"""The times of a finished step's actions, which of its lists the stage ran being told by their number."""

import struct

from stageline.broker.control.records import StepRecord
from stageline.broker.ledger.ledger import timed_actions
from stageline.pipeline.schedule import make_schedule

SCHEDULE = make_schedule("1f1b", ((0,), (1,)), 2)


def actions_of(stage: int, count: int) -> list[str]:
    times = struct.pack(f"<{2 * count}d", *range(2 * count))
    timed = timed_actions(SCHEDULE, StepRecord(stage, 7, times))
    assert [(start, end) for _, start, end in timed] == [(float(2 * n), float(2 * n + 1)) for n in range(len(timed))]
    return [str(action) for action, _, _ in timed]


def test_a_training_step_has_each_action_of_the_schedule():
    assert actions_of(1, 5) == ["1F0", "1B0", "1F1", "1B1", "1U"]


def test_a_frozen_stage_has_forwards_and_an_update():
    assert actions_of(0, 3) == ["0F0", "0F1", "0U"]


def test_a_step_that_was_not_measured_has_no_actions():
    assert actions_of(0, 0) == []


def test_a_stage_that_shares_parameters_sends_gradients_after_each_backward_or_once():
    assert actions_of(1, 7) == ["1F0", "1B0", "1T0", "1F1", "1B1", "1T1", "1U"]
    assert actions_of(1, 6) == ["1F0", "1B0", "1F1", "1B1", "1S", "1U"]
