"""The script's end of its queues: what is put when, and what a reply comes to."""

import threading
from collections import deque
from functools import partial
from pathlib import Path

import pytest

from stageline.broker.codec.message import Message
from stageline.broker.codec.structure import emptied, is_emptied
from stageline.broker.control.messages import Assigned, StepDigest, Stop
from stageline.broker.queues.memory import MemoryQueues
from stageline.pipeline.schedule import make_schedule
from stageline.pipeline.tree import Tree
from stageline.workers.errors import RunFailed
from stageline.workers.runtime.calls import Call, CallKind, Position
from stageline.workers.script.calls.driver import Driver
from support.programs import queue_named, queued_calls

RUN = "driven-run"


class InterruptedQueues(MemoryQueues):
    """The first `ring` is where Ctrl-C comes."""

    rung = 1

    @property
    def digests(self) -> deque[StepDigest]:
        return deque()

    def ring(self) -> None:
        self.rung += 1
        if self.rung == 1:
            raise KeyboardInterrupt


@pytest.fixture
def queues() -> InterruptedQueues:
    return InterruptedQueues(RUN)


@pytest.fixture
def driver(queues: InterruptedQueues) -> Driver:
    program = queued_calls(make_schedule("1f1b", ((0,), (1,)), 2)).program
    assigned = Assigned(RUN, 2, 1, 0, b"", b"")
    names = [frozenset[str]()] * 2
    fail = partial(RunFailed, folder=Path("runs/line-1"))
    return Driver(program, names, assigned, Position(), queues, deque(), fail)  # type: ignore[arg-type]


def reply(driver: Driver, queues: MemoryQueues, number: int, *payloads: Tree) -> None:
    """Both workers'; or the loss alone."""
    for worker, payload in enumerate(payloads):
        key = queue_named(f"reply-{worker}") if len(payloads) == 2 else queue_named("loss-1")
        queues.outbound(key).put(Message(RUN, key.name, number, 1, payload))
        driver._take_replies()
        driver._hand_out()


def put(queues: MemoryQueues) -> list[int]:
    """The numbers of the calls to worker 0."""
    return [message.number for message in queues.outbound(queue_named("call-0")).peek(9)]


def test_ctrl_c_while_a_call_is_submitted_loses_no_number(driver: Driver, queues: InterruptedQueues) -> None:
    queues.rung = 0
    with pytest.raises(KeyboardInterrupt):
        driver.submit(Call(CallKind.TRAIN))
    assert driver.position == Position(1, 1, 0)
    driver.submit(Call(CallKind.EVALUATE))
    driver._put_calls()
    assert put(queues) == [0, 1]
    assert driver.position == Position(1, 2, 1)


def test_a_third_call_waits_until_the_first_has_its_replies(driver: Driver, queues: InterruptedQueues) -> None:
    done = [driver.submit(Call(CallKind.EVALUATE)) for _ in range(3)]
    driver._put_calls()
    assert put(queues) == [0, 1]
    reply(driver, queues, 0, None, {"rows": 2})
    driver._take_replies()
    driver._hand_out()
    assert done[0].result(0) == {1: {"rows": 2}, 0: None}
    driver._put_calls()
    first, *others = queues.outbound(queue_named("call-1")).peek(9)
    assert [message.number for message in others] == [1, 2]
    assert is_emptied(first.payload)  # it is settled
    assert not any(is_emptied(other.payload) for other in others)


def test_a_script_that_leaves_makes_the_calls_that_it_has_submitted_and_no_others_also_once_its_run_is_stopped(
    driver: Driver, queues: InterruptedQueues
) -> None:
    """A call that waited for the replies before it was dropped with the stop, and its step with it."""
    done = [driver.submit(Call(CallKind.TRAIN)) for _ in range(3)]
    driver._put_calls()
    assert driver.leave() == 3
    driver.submit(Call(CallKind.TRAIN))
    driver._tell()
    assert driver.progress.called == 3
    driver._commands.append(Stop("left", 75, at_step_end=True, step=3))
    driver._obey()
    with pytest.raises(RunFailed):
        done[2].result(0)
    reply(driver, queues, 0, 0.5)
    driver._take_replies()
    driver._put_calls()
    assert put(queues) == [0, 1, 2]


def test_a_reply_that_is_gone_with_its_worker_fails_the_run_with_the_way_out(
    driver: Driver, queues: InterruptedQueues
) -> None:
    done = driver.submit(Call(CallKind.PREDICT))
    driver._put_calls()
    reply(driver, queues, 0, None, emptied())
    with pytest.raises(RunFailed, match=r"the reply of worker 1 to call 0 \(predict\) .* Resume the run"):
        done.result(0)
    with pytest.raises(RunFailed):
        driver.submit(Call(CallKind.PREDICT))


def test_replies_that_arrive_late_are_taken_when_the_run_is_over(driver: Driver, queues: InterruptedQueues) -> None:
    """The thread may wait for its turn for so long that the broker has said so already."""
    loss, end = driver.submit(Call(CallKind.TRAIN)), driver.submit(Call(CallKind.STOP))
    driver._put_calls()
    answers = {queue_named("loss-1"): 0.5, queue_named("reply-0"): None, queue_named("reply-1"): None}
    (first, *later) = [Message(RUN, key.name, 0, 1, payload) for key, payload in answers.items()]
    queues.outbound(queue_named("loss-1")).put(first)
    late = threading.Timer(0.3, lambda: [queues.outbound(queue_named(reply.queue)).put(reply) for reply in later])
    late.start()
    driver._commands.append(Stop("all steps are done", 0))
    driver._obey()
    late.join()
    assert driver.ended.is_set()
    assert loss.result(0) == {1: 0.5}
    assert end.result(0) == {0: None, 1: None}
