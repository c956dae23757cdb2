"""Waits for a message over a connection: a worker looks for it before it sleeps, whatever the connection is."""

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from stageline.broker.codec.message import Flow
from stageline.broker.queues import delivery as looking
from stageline.broker.queues import ends
from stageline.broker.queues import ends as linked
from stageline.broker.queues.base import QueueKey
from stageline.broker.queues.ends import LinkedQueues, QueueOptions
from stageline.broker.queues.links import InboundLink
from stageline.broker.transports.sockets.shm_queues import ShmQueues
from stageline.broker.transports.sockets.zeromq_queues import ZeroMQQueues
from support.queue_pair import KEY, RUN, QueuePair

KINDS = {"shm": ShmQueues, "ipc": ZeroMQQueues}


@pytest.fixture(params=KINDS)
def line(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> QueuePair:
    """Its consumer has granted its credit, and may use two processors."""
    monkeypatch.setattr(ends, "processors", lambda: 2)
    kind, options = KINDS[request.param], QueueOptions(microbatches=4, windows={KEY: 8}, patience=0.0)
    producer, consumer = (
        stack.enter_context(closing(kind(RUN, incarnation, f"{request.param}://{tmp_path}/{incarnation}", options)))
        for incarnation in (1, 2)
    )
    consumer.connect({KEY: producer.endpoint})
    pair = QueuePair(producer, consumer, 4)
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
    assert line.inbound.take(60).sequence == 1


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
    assert line.inbound.take(60).sequence == 1
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
    unsent = QueueKey(Flow.BACKWARD, 0)
    line.consumer.outbound(unsent).put(line.message(0, flow=unsent.flow, stage=unsent.stage))
    assert line.inbound.take(0.0001) is None
    assert len(looked) == 1
