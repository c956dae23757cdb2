"""Queues within one process, whose two ends may be in two threads."""

import threading

import pytest
import torch

from stageline.broker.codec.message import Message
from stageline.broker.errors import QueueClosed, QueueFull
from stageline.broker.queues.log import RetentionBudget
from stageline.broker.queues.memory import MemoryQueues
from stageline.pipeline.program import Queue
from support.queue_pair import queue_of

KEY, OTHER = queue_of("forward-1", count=1), queue_of("backward-0", count=1)


def message(key: Queue, number: int) -> Message:
    return Message("run", key.name, number, 1, torch.full((100,), float(number)))


def test_a_take_ends_when_another_thread_puts() -> None:
    queues = MemoryQueues("run")
    putting = threading.Timer(0.05, lambda: queues.outbound(KEY).put(message(KEY, 0)))
    putting.start()
    taken = queues.inbound(KEY).take(10_000)
    putting.join()
    assert taken is not None
    assert torch.equal(taken.payload, torch.zeros(100))


def test_a_take_ends_with_an_error_when_another_thread_closes() -> None:
    queues = MemoryQueues("run")
    inbound = queues.inbound(KEY)
    closing = threading.Timer(0.05, queues.close)
    closing.start()
    with pytest.raises(QueueClosed, match="forward-1 is closed"):
        inbound.take(10_000)
    closing.join()


def test_queues_share_one_budget() -> None:
    queues = MemoryQueues("run", RetentionBudget(1000))
    queues.outbound(KEY).put(message(KEY, 0))
    queues.outbound(OTHER).put(message(OTHER, 0))
    with pytest.raises(QueueFull, match="backward-0 retains 1 messages"):
        queues.outbound(OTHER).put(message(OTHER, 1))
    queues.outbound(KEY).trim(1)
    queues.outbound(OTHER).put(message(OTHER, 1))
