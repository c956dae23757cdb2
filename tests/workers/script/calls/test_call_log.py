"""The numbers of a script's calls."""

from stageline.workers.runtime.program.calls import CallKind, Position
from stageline.workers.script.calls.call_log import CallLog

MIXED = [
    CallKind.TRAIN, CallKind.TRAIN, CallKind.EVALUATE, CallKind.PREDICT, CallKind.TRAIN, CallKind.STATE, CallKind.TRAIN,
]  # fmt: skip


def test_calls_steps_and_evaluations_are_counted_apart():
    log = CallLog(Position(0, 0, 0))
    calls = [log.call(kind) for kind in MIXED]
    assert [call.number for call in calls] == list(range(7))
    assert [call.step for call in calls] == [0, 1, 2, 2, 2, 3, 3]
    assert [call.evaluation for call in calls] == [0, 0, 0, 1, 2, 2, 2]
    assert log.position == Position(4, 7, 2)


def test_the_position_of_a_checkpoint_is_right_after_its_last_step():
    log = CallLog(Position(0, 0, 0))
    for kind in MIXED:
        log.call(kind)
    assert log.trim(2) == Position(2, 2, 0)  # the evaluations that follow belong to what comes after it
    assert log.trim(3) == Position(3, 5, 2)
    assert log.trim(2) is None


def test_a_log_goes_on_from_a_checkpoint():
    log = CallLog(Position(20, 25, 5))
    assert log.trim(20) == Position(20, 25, 5)
    call = log.call(CallKind.TRAIN)
    assert (call.number, call.step, call.evaluation) == (25, 20, 5)
    assert log.trim(21) == Position(21, 26, 5)
