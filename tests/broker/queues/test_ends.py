"""What both transports share: waits that a ring ends, local queues, windows, waiting for room."""

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch

from stageline.broker.codec.message import Flow
from stageline.broker.queues.base import QueueKey
from stageline.broker.queues.ends import QueueEnds, Wakeup
from support.queue_pair import KEY, QueuePair
from support.redis_queues import worker as redis_worker
from support.redis_server import shared_server
from support.zeromq_queues import LOOPBACK
from support.zeromq_queues import worker as zeromq_worker

MakeWorker = Callable[..., QueueEnds]


@pytest.fixture(params=["tcp", "redis"])
def worker(request: pytest.FixtureRequest, stack: ExitStack) -> MakeWorker:
    """Makes the queues of the worker with an incarnation."""
    url = shared_server().own_database() if request.param == "redis" else LOOPBACK
    make = redis_worker if request.param == "redis" else zeromq_worker
    return lambda incarnation, **options: make(stack, incarnation, url, **options)


def line_of(producer: QueueEnds, consumer: QueueEnds) -> QueuePair:
    consumer.connect({KEY: producer.endpoint})
    return QueuePair(producer, consumer, 4)


def test_a_ring_from_another_thread_ends_a_wait(worker: MakeWorker) -> None:
    producer, consumer = worker(1), worker(2)
    inbound = line_of(producer, consumer).inbound
    ringer = threading.Timer(0.05, consumer.ring)
    ringer.start()
    assert inbound.take(10_000) is None
    consumer.ring()
    consumer.pump(10_000)
    ringer.join()


def test_a_ring_from_a_signal_handler_ends_a_wait(stack: ExitStack, worker: MakeWorker) -> None:
    consumer = worker(2)
    before = signal.signal(signal.SIGALRM, lambda number, frame: consumer.ring())
    stack.callback(signal.signal, signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    assert consumer.inbound(KEY).take(10_000) is None


def test_a_ring_before_the_wait_is_not_lost_and_a_ring_after_close_is_nothing(worker: MakeWorker) -> None:
    consumer = worker(2)
    for _ in range(1000):
        consumer.ring()
    assert consumer.inbound(KEY).take(10_000) is None
    consumer.close()
    consumer.ring()


def test_a_full_producer_waits_reports_it_and_goes_on_when_there_is_room(worker: MakeWorker) -> None:
    reasons: list[str] = []

    def waiting(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == 3:
            producer.outbound(KEY).trim(1)

    producer = worker(1, retain_bytes=5000, spill_bytes=0, waiting=waiting, patience=60.0)
    line = line_of(producer, worker(2))
    for number in range(5):
        line.outbound.put(line.message(number, torch.zeros(250)))
    assert len(reasons) == 3
    assert reasons[0].startswith("forward-1 retains 4 messages, ")
    line.inbound.rewind(1)
    assert line.take_numbers(1) == [4]


def test_an_inbound_queue_needs_a_window(worker: MakeWorker) -> None:
    with pytest.raises(ValueError, match="no window is given for evaluation-4; there is one for forward-1, backward-0"):
        worker(1).inbound(QueueKey(Flow.EVALUATION, 4))


def test_an_end_is_made_once(worker: MakeWorker) -> None:
    queues = worker(1, local={QueueKey(Flow.EVALUATION, 2)})
    for key in (KEY, QueueKey(Flow.EVALUATION, 2)):
        assert queues.outbound(key) is queues.outbound(key)
        assert queues.inbound(key) is queues.inbound(key)


def test_a_wakeup_that_nothing_reads_takes_any_number_of_rings() -> None:
    wakeup = Wakeup()
    for _ in range(100_000):
        wakeup.ring()
    wakeup.silence()
    wakeup.close()
    wakeup.ring()
