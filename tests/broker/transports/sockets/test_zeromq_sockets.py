"""Reactions of the two sockets to losses, damage, silence and strangers."""

import random
import threading
from contextlib import ExitStack, closing

import msgspec
import pytest
import torch
import zmq
from structlog.testing import capture_logs

from stageline.broker.codec.message import Message
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.broker.queues import links as inbound_link
from stageline.broker.queues import requests
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.requests import CreditRequest, RetentionReply, pack, run_named_in, unpack
from stageline.broker.queues.secrets import QueueSecrets
from stageline.broker.transports.sockets import zeromq_queues as dealer
from stageline.broker.transports.sockets.zeromq_queues import ZeroMQQueues
from stageline.pipeline.program import Queue
from support.proxy import Flip, Proxy
from support.queue_pair import KEY, RUN, QueuePair, queue_of, wait_for
from support.zeromq_queues import LOOPBACK, line_of, proxied, worker


def test_a_consumer_that_asks_before_the_queue_is_there_is_not_forgotten(stack: ExitStack) -> None:
    producer, consumer = worker(stack, 1), worker(stack, 2)
    line = line_of(producer, consumer)
    line.settle()
    line.put(0)
    assert line.outbound.depth().in_flight == 1
    assert line.take_numbers(1) == [0]


@pytest.mark.parametrize("elements", [10, 100_000, 4_000_000])
def test_a_connection_that_is_cut_again_and_again_loses_nothing(stack: ExitStack, hasty: None, elements: int) -> None:
    producer, consumer = worker(stack, 1), worker(stack, 2)
    proxy = stack.enter_context(Proxy(producer.endpoint))
    consumer.connect({KEY: proxy.endpoint})
    line = QueuePair(producer, consumer)
    payloads = [torch.randn(elements) for _ in range(12)]
    for number, payload in enumerate(payloads):
        line.outbound.put(line.message(number, payload))
        if number % 3 == 2:
            proxy.cut()
        assert torch.equal(line.take().payload, payload)
    assert proxy.connections >= 4


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_byte_is_never_accepted_and_asked_for_again(
    stack: ExitStack, hasty: None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(dealer, "UNANSWERED", 0.5)  # a damaged length can leave a connection stuck
    dice = random.Random(seed)
    producer, consumer = worker(stack, 1), worker(stack, 2)
    proxy = stack.enter_context(Proxy(producer.endpoint))
    consumer.connect({KEY: proxy.endpoint})
    line = QueuePair(producer, consumer)
    line.put(0)
    line.take()
    proxy.change = flip = Flip(dice.randrange(2000), dice.randrange(8))
    payloads = [torch.randn(50) for _ in range(20)]
    for number, payload in enumerate(payloads, start=1):
        line.outbound.put(line.message(number, payload))
    assert all(torch.equal(line.take().payload, payload) for payload in payloads)
    assert flip.fired


def test_a_connection_without_any_answer_is_replaced(
    stack: ExitStack, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealer, "UNANSWERED", 0.2)
    line, proxy, connect = proxied(stack)
    connect()
    line.put(0, 1)
    line.take()
    first = proxy.connections

    def swallow(passing: bytes) -> bytes:
        return b"" if proxy.connections == first else passing

    proxy.change = swallow
    line.settle()
    line.put(2, 3)
    assert line.take_numbers(3) == [1, 2, 3]
    assert proxy.connections > first


def test_a_producer_of_another_run_is_refused_with_both_names(stack: ExitStack) -> None:
    consumer = worker(stack, 2)
    other = stack.enter_context(closing(ZeroMQQueues("other", 1, LOOPBACK, QueueOptions())))
    other.outbound(KEY)
    with pytest.raises(ForeignMessage, match="belongs to run 'other', this one to run 'line-run'"):
        line_of(other, consumer).take()


def test_a_producer_of_another_version_is_refused_with_both_versions(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = worker(stack, 1), worker(stack, 2)
    line = line_of(producer, consumer)
    monkeypatch.setattr(requests, "_VERSION", b"\x09")
    with pytest.raises(ForeignMessage, match="has version 9 of its requests, this one 3"):
        line.take()


def test_garbage_from_a_stranger_changes_nothing(stack: ExitStack) -> None:
    producer, consumer = worker(stack, 1), worker(stack, 2)
    line = line_of(producer, consumer)
    line.put(0)
    context = stack.enter_context(zmq.Context())
    stranger = stack.enter_context(context.socket(zmq.DEALER))
    stranger.linger = 0
    stranger.connect(producer.endpoint)
    dice = random.Random(4)
    for size in [0, 1, 4, 5, 20, 500, 3000]:
        stranger.send_multipart([dice.randbytes(size) for _ in range(dice.randrange(1, 4))])
    stranger.send(dice.randbytes(10_000))  # more than a request may have: ZeroMQ drops the connection
    assert line.take_numbers(1) == [0]
    line.put(*range(1, 30))
    assert line.take_numbers(29) == list(range(1, 30))


QUEUE_KEYS = {KEY.name: b"q" * 32}
SECRETS = QueueSecrets(QUEUE_KEYS)
OF_NOW = CreditRequest(RUN, KEY.name, 2, 2**40, 0, 10**6, resend=True, ask=True)  # 2: the consumer's
OF_LATER = msgspec.structs.replace(OF_NOW, incarnation=2**53 - 1)


@pytest.mark.parametrize("keys", [{}, {KEY.name: b"x" * 32}], ids=["not sealed", "another key"])
@pytest.mark.parametrize("forged", [OF_NOW, OF_LATER], ids=["current incarnation", "a later incarnation"])
def test_a_request_from_a_stranger_diverts_no_queue(
    stack: ExitStack, forged: CreditRequest, keys: dict[str, bytes]
) -> None:
    """The first sent 114 activations to the stranger and froze the run; the second fenced all consumers for good."""
    producer, consumer = worker(stack, 1, secrets=SECRETS), worker(stack, 2, secrets=SECRETS)
    line = line_of(producer, consumer)
    line.put(0, 1)
    assert line.take_numbers(1) == [0]
    stranger = stranger_at(stack, producer.endpoint)
    with capture_logs() as logged:
        for _ in range(20):
            stranger.send(pack(forged, keys))
        wait_for(lambda: producer.pump(0.01) or logged or None)
    assert logged[0]["event"] == "refused"
    assert "from a process outside the run" in logged[0]["reason"]
    line.put(*range(2, 40))
    assert line.take_numbers(39) == list(range(1, 40))
    assert not stranger.poll(0)


def test_a_request_that_was_recorded_and_is_sent_again_diverts_no_queue(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[bytes] = []
    monkeypatch.setattr(inbound_link, "pack", lambda *of: recorded.append(pack(*of)) or recorded[-1])
    producer, consumer = worker(stack, 1, secrets=SECRETS), worker(stack, 2, secrets=SECRETS)
    line = line_of(producer, consumer)
    line.put(0, 1)
    assert line.take_numbers(1) == [0]
    stranger = stranger_at(stack, producer.endpoint)
    requests_ = [frame for frame in recorded if run_named_or_none(frame)]
    assert requests_
    for frame in requests_:
        stranger.send(frame)
    asked = [unpack(frame, CreditRequest, QUEUE_KEYS).ask for frame in requests_]
    for _ in range(sum(asked)):  # what can be had is no secret
        wait_for(lambda: producer.pump(0.01) or stranger.poll(0) or None)
        header, *_ = stranger.recv_multipart()
        assert header == b""
    line.put(*range(2, 40))
    assert line.take_numbers(39) == list(range(1, 40))
    assert not stranger.poll(0)


def test_a_forged_reply_is_damage(stack: ExitStack) -> None:
    """One with a newer incarnation fenced the consumer."""
    consumer = worker(stack, 2, secrets=SECRETS)
    context = stack.enter_context(zmq.Context())
    impostor = stack.enter_context(context.socket(zmq.ROUTER))
    impostor.linger = 0
    impostor.bind("tcp://127.0.0.1:*")
    consumer.connect({KEY: impostor.get_string(zmq.LAST_ENDPOINT)})
    wait_for(lambda: consumer.pump(0.01) or impostor.poll(0) or None)
    peer, _ = impostor.recv_multipart()
    fenced = RetentionReply(RUN, KEY.name, 2**53 - 1, 1, 0, 0)
    for keys in ({}, {KEY.name: b"x" * 32}):
        impostor.send_multipart([peer, b"", pack(fenced, keys)])
        wait_for(lambda: consumer.pump(0.01) or impostor.poll(0) or None)
        _, again = impostor.recv_multipart()
        assert unpack(again, CreditRequest, QUEUE_KEYS).resend
    assert consumer.inbound(KEY).take(0) is None


def run_named_or_none(frame: bytes) -> str | None:
    try:
        return run_named_in(frame)
    except BadMessage:
        return None


def stranger_at(stack: ExitStack, endpoint: str) -> "zmq.Socket[bytes]":
    context = stack.enter_context(zmq.Context())
    stranger = stack.enter_context(context.socket(zmq.DEALER))
    stranger.linger = 0
    stranger.connect(endpoint)
    return stranger


def test_several_queues_share_one_connection(stack: ExitStack) -> None:
    keys = [queue_of(f"{what}-{stage}", window=3) for what in ("forward", "loss", "call") for stage in range(14)]
    producer, consumer = worker(stack, 1), worker(stack, 2)
    consumer.connect(dict.fromkeys(keys, producer.endpoint))
    for number in range(20):
        for key in keys:
            payload = torch.full((4,), float(number))
            producer.outbound(key).put(Message(RUN, key.name, number, 1, payload))
    lines = {key: consumer.inbound(key) for key in keys}
    dice = random.Random(1)
    order = dice.sample(keys * 20, len(keys) * 20)
    taken: dict[Queue, list[int]] = {key: [] for key in keys}
    for key in order:

        def look(key: Queue = key) -> Message | None:
            producer.pump(0)
            return lines[key].take(0.01)

        taken[key].append(wait_for(look).number)
    assert all(numbers == list(range(20)) for numbers in taken.values())


def test_what_a_full_connection_does_not_take_is_sent_later(stack: ExitStack) -> None:
    producer = worker(stack, 1, ahead=0)  # with room for few messages on a connection
    consumer, queue = worker(stack, 2, ahead=400), queue_of("forward-1", window=400)
    passing = threading.Event()
    passing.set()
    proxy = stack.enter_context(Proxy(producer.endpoint))
    proxy.change = lambda data: data if passing.wait(60) else b""
    consumer.connect({queue: proxy.endpoint})
    line = QueuePair(producer, consumer, queue)
    line.settle()
    passing.clear()
    payload = torch.randn(50_000)
    for number in range(400):
        line.outbound.put(line.message(number, payload))
    assert 0 < line.outbound.depth().ready < 400
    passing.set()
    assert line.take_numbers(400) == list(range(400))
