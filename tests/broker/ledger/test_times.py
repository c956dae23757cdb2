"""The waits of a stage in a finished step: they come back with their causes, beside the actions."""

import pytest

from stageline.broker.control.records import StepRecord
from stageline.broker.ledger.times import (
    TimedWait,
    WaitCause,
    last_end,
    timed_actions,
    timed_waits,
    totals,
    unreadable_times,
)
from stageline.pipeline.schedule import Action, Kind
from support.packed import packed_times

FORWARD, BACKWARD, UPDATE = (Action(kind, 1) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE))
RAN = [
    TimedWait(WaitCause.DISK, None, 0.0, 2.0),
    TimedWait(WaitCause.MESSAGE, 0, 2.0, 3.0),
    TimedWait(WaitCause.DATA, None, 3.0, 3.25),
    (FORWARD, 3.0, 4.0),
    TimedWait(WaitCause.MESSAGE, 2, 4.0, 6.0),
    (BACKWARD, 6.0, 8.0),
    TimedWait(WaitCause.ROOM, 0, 8.0, 8.5),
    (UPDATE, 9.0, 10.0),
]


def test_every_wait_comes_back_with_its_cause_and_the_action_that_it_held_up() -> None:
    record = StepRecord(1, 7, packed_times(RAN))
    assert timed_actions(record) == [(FORWARD, 3.0, 4.0), (BACKWARD, 6.0, 8.0), (UPDATE, 9.0, 10.0)]
    before = [FORWARD, FORWARD, FORWARD, BACKWARD, UPDATE]
    waits = [each for each in RAN if isinstance(each, TimedWait)]
    assert timed_waits(record) == [each._replace(before=at) for each, at in zip(waits, before, strict=True)]


@pytest.mark.parametrize("cause", WaitCause)
def test_the_letter_of_no_wait_is_that_of_an_action(cause: WaitCause) -> None:
    assert unreadable_times(packed_times([TimedWait(cause, 9, 0.0, 1.0)]), microbatches=2) == ""
    assert cause.islower()
    assert cause not in set(Kind)


def test_a_steps_totals_tell_computing_from_data_and_from_waits() -> None:
    found = totals(StepRecord(1, 7, packed_times(RAN)))
    assert found is not None
    assert (found.step, found.start, found.end) == (7, 3.0, 10.0)
    assert (found.busy, found.data, found.disk, found.script) == (3.75, 0.25, 2.0, 0.0)
    assert totals(StepRecord(1, 7, b"")) is None


def test_a_steps_end_is_that_of_its_last_action() -> None:
    after = TimedWait(WaitCause.ROOM, 0, 10.0, 12.0)
    assert last_end(packed_times([*RAN, after])) == 10.0
    assert last_end(packed_times([after])) is None
    assert last_end(b"") is None
    assert last_end(b"?" * 42) is None  # of another version
