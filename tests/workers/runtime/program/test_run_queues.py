"""Which queues a run has, between whom, and which of their messages are kept."""

import pytest

from stageline.pipeline.evaluation import Rounds
from stageline.pipeline.schedule import make_schedule
from stageline.workers.runtime.calls import CallKind
from stageline.workers.runtime.program.program import Program
from stageline.workers.runtime.program.queue_keys import call_key, loss_key, queue_key, reply_key
from support.shapes import line, looped


def test_a_worker_with_several_stages_has_queues_of_its_own() -> None:
    queues = Program(make_schedule("interleaved-1f1b", looped(2, 2), 2), 1).queues
    assert queues.local(0) == set()
    assert queues.producers(0) == {queue_key("forward-2"): 1, queue_key("backward-0"): 1, queue_key("backward-2"): 1}
    together = Program(make_schedule("gpipe", ((0, 1),), 2), 1).queues
    assert together.local(0) == set(together.all)
    assert together.producers(0) == {}


@pytest.mark.parametrize(("name", "stage"), [("forward-2", 1), ("backward-2", 3)])
def test_a_queue_is_filled_by_the_neighbour_of_the_stage_that_takes_from_it(name: str, stage: int) -> None:
    assert Program(make_schedule("gpipe", line(4), 1), 1).queues.table[queue_key(name)].source == stage
    assert str(queue_key(name)) == name


def test_the_script_is_one_more_place_that_calls_and_takes_replies() -> None:
    program = Program(make_schedule("gpipe", line(2), 1), 1, scripted=True)
    queues, evaluation = program.queues, queue_key("evaluation-1")
    assert program.script == 2
    assert queues.inbound(2) == [reply_key(0), reply_key(1), loss_key(1)]
    assert queues.outbound(2) == [call_key(0), call_key(1)]
    assert queues.producers(2) == {reply_key(0): 0, reply_key(1): 1, loss_key(1): 1}
    assert queues.producers(1) == {queue_key("forward-1"): 0, evaluation: 0, call_key(1): 2}
    assert queues.outbound(1) == [queue_key("backward-0"), reply_key(1), loss_key(1)]
    assert queues.answers(CallKind.TRAIN) == (loss_key(1),)
    assert queues.answers(CallKind.STATE) == (reply_key(1), reply_key(0))
    assert queues.local(0) == queues.local(2) == set()


@pytest.mark.parametrize(
    ("name", "first", "within"),
    [("evaluation-1", 0, [0, 2, 9]), ("replayed-0", 2, [2, 2, 9]), ("forward-1", 0, [0, 2, 2])],
)
def test_queues_are_trimmed_within_the_steps_that_use_them(name: str, first: int, within: list[int]) -> None:
    queues = Program(make_schedule("gpipe", line(2), 1, first_trainable=1), 12, Rounds(12, 2), replayed_from=2).queues
    queue = queues.table[queue_key(name)]
    assert queue.begins == first
    assert [queue.within(floor) for floor in (0, 2, 9)] == within
