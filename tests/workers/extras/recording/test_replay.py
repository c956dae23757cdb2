"""When a replay counts as reproduced, and which instructions are of the wanted microbatch."""

import pytest

from stageline.pipeline.schedule import make_schedule
from stageline.workers.extras.recording.records import Reason
from stageline.workers.extras.recording.replay import Replayed, ReplayOutcome, ReplayTarget
from stageline.workers.runtime.losses import ComputeFailed
from support.programs import calls_of

RAISED = Reason(action="1F5", raised=True, reason="ValueError: one row only [SL203]")
NOT_FINITE = Reason(action="1B5", raised=False, reason="the loss is nan")


@pytest.mark.parametrize(
    ("same", "reason", "error", "reproduced"),
    [
        ([True, True], None, None, True),
        ([True, None], None, None, True),
        ([True, False], None, None, False),
        ([True], NOT_FINITE, None, True),
        ([False], NOT_FINITE, None, False),
        ([], RAISED, ComputeFailed("ValueError: one row only"), True),
        ([], RAISED, ComputeFailed("ValueError: another"), False),
        ([True], RAISED, None, False),
        ([], None, ComputeFailed("ValueError: one row only"), False),
    ],
)
def test_a_replay_reproduces_the_run_if_its_bits_or_its_failure_are_the_recorded_ones(same, reason, error, reproduced):
    outcomes = [ReplayOutcome("1F5", "float32 []", each) for each in same]
    assert Replayed("run-1", 0, 3, outcomes, reason, error).reproduced is reproduced


def test_a_microbatchs_instructions_are_its_forward_and_its_backward_on_one_stage():
    program = calls_of(make_schedule("1f1b", [(0, 1)], 2), 2)
    wanted = ReplayTarget(stage=1, step=1, microbatch=0)
    assert [str(each) for each in program.instructions(0) if wanted.is_of(each)] == ["1F0 of step 1", "1B0 of step 1"]
