"""Reads from a server that is slow, cut off, or gives damaged bytes, or more than there is memory for."""

import random
import select
import threading
from contextlib import ExitStack, closing

import pytest
import torch

from stageline.broker.codec.message import Message
from stageline.broker.errors import BadMessage
from stageline.broker.queues import delivery as looking
from stageline.broker.queues import ends
from stageline.broker.transports.redis import connection as redis_connection
from stageline.broker.transports.redis import forms, queues, threads
from stageline.broker.transports.redis.answers import RedisGarbled, RedisUnfit
from stageline.broker.transports.redis.connection import RedisLink
from stageline.broker.transports.redis.sender_thread import SenderThread
from stageline.broker.transports.redis.threads import ReceiverThread
from stageline.pipeline.program import Queue
from support.false_redis import FalseRedis
from support.proxy import Flip, Proxy
from support.queue_pair import BACK, KEY, LIMIT, RUN, QueuePair, queue_of, wait_for
from support.redis_queues import STREAM, line_at, payloads, put_all, take_all, use, worker
from support.redis_server import RedisServer, shared_server

pytestmark = pytest.mark.usefixtures("each_form")

ARRAY = b"*4294967295\r\n"  # of 34 GB
NAMED = r"Redis at redis://127.0.0.1:\d+/0 answers as .*: it announces an array of 4294967295 elements"


def test_a_waiting_computing_thread_reads_itself(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    line = line_at(stack, shared_server().own_database())
    line.put(0)
    line.take()
    monkeypatch.setattr(ReceiverThread, "_take_lead", lambda thread: not thread._ends.over.wait())
    for number in range(1, 8):  # the window: the producer does not wait for messages, so no more credit is read
        line.put(number)
        assert line.take().number == number


def test_a_worker_looks_for_a_message_before_it_sleeps_and_a_ring_ends_that(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "processors", lambda: 2)
    line = line_at(stack, shared_server().own_database())
    line.put(0)
    line.take()
    monkeypatch.setattr(ReceiverThread, "_take_lead", lambda thread: not thread._ends.over.wait())
    wait_for(lambda: None if line.consumer._receiver.lead.locked() else True)
    monkeypatch.setattr(looking, "LOOK", 60.0)
    look_until = queues.look_until
    monkeypatch.setattr(queues, "look_until", lambda *looks: look_until(*looks) or pytest.fail("it sleeps"))
    line.consumer._looking = looking.Looking(2)
    line.put(1)
    assert line.inbound.take(60).number == 1
    threading.Timer(0.05, line.consumer.ring).start()
    assert line.inbound.take(60) is None


def test_a_message_that_comes_while_a_worker_computes_is_not_asked_for_only_then(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_lead = ReceiverThread._take_lead

    def connects_only(thread: ReceiverThread) -> bool:
        return not thread._ends.over.wait() if thread.link.is_fit else take_lead(thread)

    monkeypatch.setattr(ReceiverThread, "_take_lead", connects_only)
    line = line_at(stack, shared_server().own_database())
    line.put(0)
    line.take()
    receiver = line.consumer._receiver
    wait_for(lambda: None if receiver.lead.locked() else True)
    line.consumer.outbound(BACK).put(Message(RUN, BACK.name, 0, 2, torch.ones(3)))
    line.put(1)
    poll = select.poll()
    poll.register(receiver.link.fd, select.POLLIN)
    assert poll.poll(1000 * LIMIT)
    assert line.take().number == 1


def test_a_consumer_with_a_window_of_one_does_not_wait_for_a_thread_that_has_nothing_to_ask_for(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread slept in the lead, so that neither was credit sent nor the next message read: 10 ms for each."""
    line = line_at(stack, shared_server().own_database(), queue_of("forward-1", window=1))
    line.put(0)
    line.take()
    monkeypatch.setattr(threads, "BLOCK_BRIEFLY", 3 * LIMIT)
    line.put(*range(1, 6))
    thread = line.consumer._receiver
    wait_for(lambda: (thread._rests and line.consumer._shared.readers[0].receiver.ready) or None)
    assert line.take_numbers(5) == list(range(1, 6))


def test_a_consumer_that_waits_often_and_briefly_is_connected_and_reads(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its waits kept the thread from making the connection."""
    monkeypatch.setattr(threads, "PARKED", 0.05)
    server = shared_server()
    database = server.own_number()
    line = line_at(stack, server.tcp_url_of(database))
    for number in range(2):
        line.put(number)
        assert wait_for(lambda: line.inbound.take(0.001)).number == number
        server.client().client_kill_filter(_type="normal", skipme=True)


def test_a_connection_is_closed_only_by_the_thread_that_uses_it(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be about to write to the descriptor, by its number: once that is closed, it may be another file's."""
    closed: list[tuple[RedisLink, threading.Thread]] = []
    close = RedisLink.close
    monkeypatch.setattr(
        RedisLink, "close", lambda link: (closed.append((link, threading.current_thread())), close(link))
    )
    line = line_at(stack, shared_server().own_database())
    line.put(0)
    line.take()
    receiver = line.consumer._receiver
    line.consumer.close()
    assert not receiver.is_alive()
    assert {thread for link, thread in closed if link is receiver.link} == {receiver}


def test_a_thread_takes_over_a_connection_without_answers(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that a computing thread has asked over may be lost, and that thread never waits long enough to see it."""
    monkeypatch.setattr(threads, "OVERDUE", 0.0)
    line = line_at(stack, shared_server().own_database())
    for number in range(20):
        line.put(number)
        assert line.take().number == number


def test_a_frozen_server_stops_no_computation(
    stack: ExitStack, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_connection, "SILENCE", 0.3)
    line = line_at(stack, server.url)
    line.put(0)
    line.take()
    server.freeze()
    line.put(*range(1, 200))
    assert line.inbound.take(0) is None
    wait_for(lambda: line.producer.pump(0.01) or line.producer.trouble)
    server.thaw()
    assert line.take_numbers(199) == list(range(1, 200))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_cut_answers_make_no_gap_and_no_duplicate(stack: ExitStack, hasty: None, seed: int) -> None:
    """A client that simply sends again what it got no answer to has two entries then: ids forbid that."""
    server, dice = shared_server(), random.Random(seed)
    proxy = stack.enter_context(Proxy(f"tcp://127.0.0.1:{server.port}"))
    database = server.own_number()
    cuts = []

    def cut(passing: bytes) -> bytes:
        if dice.random() > 0.15 or len(cuts) > 20:
            return passing
        proxy.cut()
        cuts.append(passing)
        return passing[: dice.randrange(len(passing))]

    url = f"redis://{proxy.endpoint.removeprefix('tcp://')}/{database}"
    line = QueuePair(worker(stack, 1, url), worker(stack, 2, url))
    proxy.change = cut
    tensors = payloads(60, dice.choice([10, 5_000, 400_000]))
    for number, tensor in enumerate(tensors):
        put_all(line, [tensor], number)
        take_all(line, [tensor])
    assert cuts
    client = stack.enter_context(closing(server.client(database)))
    assert [int(entry_id.split(b"-")[0]) for entry_id, fields in client.xrange(STREAM) if b"h" in fields] == [
        *range(60)
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("direction", ["change", "change_there"])
def test_a_damaged_byte_is_never_accepted(
    stack: ExitStack, hasty: None, monkeypatch: pytest.MonkeyPatch, direction: str, seed: int
) -> None:
    monkeypatch.setattr(redis_connection, "SILENCE", 0.5)  # a damaged length can leave a connection stuck
    server, dice = shared_server(), random.Random(seed)
    proxy = stack.enter_context(Proxy(f"tcp://127.0.0.1:{server.port}"))
    url = f"redis://{proxy.endpoint.removeprefix('tcp://')}/{server.own_number()}"
    line = line_at(stack, url)
    line.put(0)
    line.take()
    flip = Flip(dice.randrange(6000), dice.randrange(8))
    setattr(proxy, direction, flip)
    tensors = payloads(30)
    put_all(line, tensors, 1)
    take_all(line, tensors)
    wait_for(lambda: flip.fired or None)


def test_a_hole_in_a_stream_is_mended(stack: ExitStack, server: RedisServer, hasty: None) -> None:
    line = line_at(stack, server.url)
    line.put(*range(12))
    line.take_numbers(12)
    line.settle()
    client = stack.enter_context(closing(server.client()))
    assert client.xdel(STREAM, "5-1", "6-1") == 2
    line.inbound.rewind(0)
    assert line.take_numbers(12) == list(range(12))


def test_a_message_damaged_at_the_server_is_mended(stack: ExitStack, server: RedisServer, hasty: None) -> None:
    line = line_at(stack, server.url)
    line.put(0)
    line.take()
    client = stack.enter_context(closing(server.client()))
    [(_, fields)] = client.xrange(STREAM)
    client.xadd(STREAM, {**fields, b"h": fields[b"h"][:-1] + b"?"}, id="1-1")
    client.xadd(STREAM, {b"alien": b"entry"}, id="2-1")
    line.put(*range(1, 8))
    assert line.take_numbers(7) == list(range(1, 8))


def test_a_message_that_stays_damaged_is_named(stack: ExitStack, server: RedisServer, hasty: None) -> None:
    consumer = worker(stack, 2, server.url)
    client = stack.enter_context(closing(server.client()))
    line = line_at(stack, server.url)
    line.put(0)
    line.take()
    [(_, fields)] = client.xrange(STREAM)
    line.producer.close()
    client.xadd(STREAM, {**fields, b"h": fields[b"h"][:-1] + b"?"}, id="1-1")
    with pytest.raises(BadMessage, match="message 1 of forward-1 arrived damaged 9 times in a row"):
        consumer.inbound(KEY).rewind(0), QueuePair(consumer, consumer).take_numbers(2)


def test_several_queues_share_one_connection(stack: ExitStack) -> None:
    url = shared_server().own_database()
    keys = [queue_of(f"{what}-{stage}", window=3) for what in ("forward", "loss", "call") for stage in range(14)]
    producer, consumer = worker(stack, 1, url), worker(stack, 2, url)
    for number in range(20):
        for key in keys:
            payload = torch.full((4,), float(number))
            producer.outbound(key).put(Message(RUN, key.name, number, 1, payload))
    taken: dict[Queue, list[int]] = {key: [] for key in keys}
    for key in random.Random(1).sample(keys * 20, len(keys) * 20):
        taken[key].append(wait_for(lambda key=key: consumer.inbound(key).take(0.1)).number)
    assert all(numbers == list(range(20)) for numbers in taken.values())


@pytest.mark.parametrize("command", [b"EXEC", b"XREAD"])
def test_a_server_that_goes_on_announcing_too_much_is_named_and_ends_the_worker(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, command: bytes
) -> None:
    """It ended with a MemoryError that named nothing."""
    if command == b"XREAD":  # to the sender, what else is answered would be garbled, too
        monkeypatch.setattr(SenderThread, "_take_lead", lambda thread: not thread._ends.over.wait())
    server = stack.enter_context(FalseRedis({b"XREAD": b"*-1\r\n", command: ARRAY, b"": b"+QUEUED\r\n"}))
    queues = worker(stack, 1, f"redis://127.0.0.1:{server.port}/0", patience=0.3)
    queues.inbound(KEY).rewind(0)
    trouble = wait_for(lambda: queues.trouble)
    with pytest.raises(RedisGarbled, match=NAMED) as caught:
        use(queues)
    assert trouble.reason == str(caught.value)
    assert server.connections > 2  # it was tried again


def test_what_is_no_answer_is_named_with_the_address(stack: ExitStack) -> None:
    """It was a TypeError, and named nothing."""
    server = stack.enter_context(FalseRedis({b"": b"+QUEUED\r\n", b"XREAD": b":7\r\n", b"EXEC": b"*2\r\n:1\r\n:2\r\n"}))
    queues = worker(stack, 1, f"redis://127.0.0.1:{server.port}/0")
    queues.inbound(KEY).rewind(0)
    with pytest.raises((RedisGarbled, RedisUnfit), match=r"redis://127.0.0.1:\d+/0"):
        use(queues)


@pytest.mark.parametrize("asked", [b"XREAD", b"XADD", b"INFO"])
def test_a_worker_that_is_told_of_too_much_connects_again_and_goes_on(
    stack: ExitStack, server: RedisServer, asked: bytes
) -> None:
    proxy = stack.enter_context(Proxy(f"tcp://127.0.0.1:{server.port}"))
    seen: list[bytes] = []

    def look(passing: bytes) -> bytes:
        if asked in passing and not seen:
            seen.append(passing)
            proxy.change = lie
        return passing

    def lie(passing: bytes) -> bytes:
        proxy.change = bytes
        return ARRAY + passing

    proxy.change_there = look
    line = line_at(stack, f"redis://{proxy.endpoint.removeprefix('tcp://')}/0")
    tensors = payloads(30)
    put_all(line, tensors)
    take_all(line, tensors)
    assert seen
    assert proxy.connections > 4


def test_entries_that_never_end_a_message_are_not_kept(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, hasty: None
) -> None:
    """Each was kept until the last one came, which has the header: a server could fill the memory with them."""
    for form in (forms.PlainForm, forms.SealedForm):
        monkeypatch.setattr(form, "longest", 50_000)
    database = shared_server().own_number()
    client = shared_server().client(database)
    line = line_at(stack, shared_server().url_of(database))
    for place in range(1, 7):
        client.xadd("stageline:{line-run}:forward-1", {"t": 0, "d": bytes(10_000)}, id=f"0-{place}")
    client.close()
    line.inbound.rewind(0)
    reader = line.consumer._shared.readers[0]
    wait_for(lambda: reader.receiver.failures or None)
    tensors = payloads(10)
    put_all(line, tensors)
    take_all(line, tensors)
