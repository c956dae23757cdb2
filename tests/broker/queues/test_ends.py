"""Parts that the transports share: waits that a ring ends, local queues, windows, waiting for room and for messages."""

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from stageline.broker.queues import delivery as looking
from stageline.broker.queues import ends
from stageline.broker.queues import ends as linked
from stageline.broker.queues.ends import LinkedQueues, QueueEnds, QueueOptions
from stageline.broker.queues.links import InboundLink
from stageline.broker.queues.wakeup import Wakeup
from stageline.broker.transports.sockets.shm_queues import ShmQueues
from stageline.broker.transports.sockets.zeromq_queues import ZeroMQQueues
from support.queue_pair import KEY, RUN, QueuePair, queue_of
from support.redis_queues import worker as redis_worker
from support.redis_server import shared_server
from support.zeromq_queues import LOOPBACK
from support.zeromq_queues import worker as zeromq_worker

MakeWorker = Callable[..., QueueEnds]
KINDS = {"shm": ShmQueues, "ipc": ZeroMQQueues}


@pytest.fixture(params=["tcp", "redis"])
def worker(request: pytest.FixtureRequest, stack: ExitStack) -> MakeWorker:
    """Makes the queues of the worker with an incarnation."""
    url = shared_server().own_database() if request.param == "redis" else LOOPBACK
    make = redis_worker if request.param == "redis" else zeromq_worker
    return lambda incarnation, **options: make(stack, incarnation, url, **options)


def line_of(producer: QueueEnds, consumer: QueueEnds) -> QueuePair:
    consumer.connect({KEY: producer.endpoint})
    return QueuePair(producer, consumer)


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
    with pytest.raises(ValueError, match="evaluation-4 has no window"):
        worker(1).inbound(queue_of("evaluation-4", window=None))


def test_an_end_is_made_once(worker: MakeWorker) -> None:
    queues = worker(1)
    for queue in (KEY, replace(queue_of("evaluation-2"), consumer=0)):
        assert queues.outbound(queue) is queues.outbound(queue)
        assert queues.inbound(queue) is queues.inbound(queue)


def test_a_wakeup_that_nothing_reads_takes_any_number_of_rings() -> None:
    wakeup = Wakeup()
    for _ in range(100_000):
        wakeup.ring()
    wakeup.silence()
    wakeup.close()
    wakeup.ring()


@pytest.fixture(params=KINDS)
def line(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> QueuePair:
    """Its consumer has granted its credit, and may use two processors."""
    monkeypatch.setattr(ends, "processors", lambda: 2)
    kind, options = KINDS[request.param], QueueOptions(patience=0.0)
    producer, consumer = (
        stack.enter_context(closing(kind(RUN, incarnation, f"{request.param}://{tmp_path}/{incarnation}", options)))
        for incarnation in (1, 2)
    )
    consumer.connect({KEY: producer.endpoint})
    pair = QueuePair(producer, consumer)
    pair.put(0)
    pair.take()
    consumer._looking = looking.Looking(2)
    return pair


def link_of(queues: LinkedQueues) -> InboundLink:
    (found,) = queues._links.values()
    return found


def test_a_message_that_comes_while_a_worker_looks_is_taken_without_sleep(
    line: QueuePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "LOOK", 60.0)
    monkeypatch.setattr(line.consumer, "_sleep", None)
    link = link_of(line.consumer)
    has_arrived = link.has_arrived

    def put_meanwhile() -> bool:
        monkeypatch.setattr(link, "has_arrived", has_arrived)
        line.put(1)
        return False

    monkeypatch.setattr(link, "has_arrived", put_meanwhile)
    assert line.inbound.take(60).number == 1


def test_a_message_that_comes_soon_after_falling_asleep_makes_it_look_again(
    line: QueuePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "LOOK", 60.0)  # any wait is shorter
    decides = line.consumer._looking
    decides._sleeps = looking.MOST
    sleep = LinkedQueues._sleep

    def put_meanwhile(queues: LinkedQueues, *of: object) -> object:
        line.put(1)
        return sleep(queues, *of)  # type: ignore[arg-type]

    monkeypatch.setattr(LinkedQueues, "_sleep", put_meanwhile)
    assert line.inbound.take(60).number == 1
    assert decides.seconds() == 60.0


def test_a_worker_that_looks_in_vain_looks_in_fewer_waits(line: QueuePair, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, looked = [0], list[int]()
    monkeypatch.setattr(linked, "look_until", lambda until, find: looked.append(waits[-1]))
    while len(waits) < 18:
        assert line.inbound.take(0.0001) is None
        waits.append(len(waits))
    assert looked == [0, 3, 8]


def test_a_worker_whose_consumers_have_yet_to_grant_credit_serves_them_and_does_not_look(
    line: QueuePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a queue with a window of 1 a message took 281 us in place of 169: each side looked for an answer to what it
    had not sent."""
    looked = list[float]()
    monkeypatch.setattr(linked, "look_until", lambda until, find: looked.append(until))
    monkeypatch.setattr(line.consumer._looking, "seconds", lambda: looking.LOOK)
    assert line.inbound.take(0.0001) is None
    unsent = queue_of("backward-0")
    line.consumer.outbound(unsent).put(line.message(0, queue=unsent.name))
    assert line.inbound.take(0.0001) is None
    assert len(looked) == 1
