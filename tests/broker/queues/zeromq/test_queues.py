"""Queues over real sockets, real processes and a real network in between that breaks."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from stageline.broker.codec.message import Flow, Message
from stageline.broker.errors import EndpointTaken, Fenced, ForeignMessage
from stageline.broker.queues.base import QueueKey
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.zeromq import connection, requests, sockets
from stageline.broker.queues.zeromq.connection import Handshake
from stageline.broker.queues.zeromq.queues import ZeroMQQueues
from support.paths import importing_tests
from support.proxy import Flip, Proxy
from support.queue_pair import KEY, RUN, QueuePair, wait_for
from support.workspace import free_port

LOOPBACK = "tcp://127.0.0.1:0"
BACK = QueueKey(Flow.BACKWARD, 0)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers that do not wait long before they ask again, so that a test of it is short."""
    monkeypatch.setattr(requests, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(requests, "LONGEST_PAUSE", 0.2)


def worker(stack: ExitStack, incarnation: int, url: str = LOOPBACK, **changed: Any) -> ZeroMQQueues:
    terms = QueueOptions(**{"microbatches": 4, "windows": {KEY: 8, BACK: 8}, "patience": 0.0, **changed})
    return stack.enter_context(closing(ZeroMQQueues(RUN, incarnation, url, terms)))


def line_of(producer: ZeroMQQueues, consumer: ZeroMQQueues) -> QueuePair:
    consumer.connect({KEY: producer.endpoint})
    return QueuePair(producer, consumer, 4)


@contextmanager
def producer_process(url: str, incarnation: int, step: int, end: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    words = [sys.executable, "-m", "support.producer_process", url, *map(str, (incarnation, step, end))]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=importing_tests()
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def take_numbers(consumer: ZeroMQQueues, count: int) -> list[int]:
    """Takes from a producer in another process, and sees that each message is what its number says."""
    messages = [wait_for(lambda: consumer.inbound(KEY).take(1)) for _ in range(count)]
    assert all(torch.equal(message.payload, torch.full((3,), float(message.sequence))) for message in messages)
    return [message.sequence for message in messages]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_killed_producer_is_replaced_and_the_consumer_goes_on(
    stack: ExitStack, tmp_path: Path, transport: str
) -> None:
    urls = [f"ipc://{tmp_path}/first", f"ipc://{tmp_path}/second"] if transport == "ipc" else [LOOPBACK] * 2
    consumer = worker(stack, 2, f"ipc://{tmp_path}/consumer")
    with producer_process(urls[0], incarnation=1, step=0, end=40) as (endpoint, process):
        consumer.connect({KEY: endpoint})
        taken = take_numbers(consumer, 10)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    with producer_process(urls[1], incarnation=3, step=1, end=100) as (endpoint, _):
        consumer.connect({KEY: endpoint})
        taken += take_numbers(consumer, 90)
    assert taken == list(range(100))


def test_a_producer_may_come_back_at_the_same_address(stack: ExitStack, tmp_path: Path, hasty: None) -> None:
    url = f"ipc://{tmp_path}/producer"
    consumer = worker(stack, 2)
    consumer.connect({KEY: url})
    with producer_process(url, incarnation=1, step=0, end=40) as (_, process):
        taken = take_numbers(consumer, 10)
        process.send_signal(signal.SIGKILL)
    with producer_process(url, incarnation=3, step=2, end=40):
        taken += take_numbers(consumer, 30)
    assert taken == list(range(40))


def test_a_replaced_consumer_takes_over_and_its_zombie_is_told(stack: ExitStack) -> None:
    producer, first, second = worker(stack, 1), worker(stack, 2), worker(stack, 3)
    old = line_of(producer, first)
    old.put(*range(30))
    assert old.take_numbers(6) == list(range(6))
    new = line_of(producer, second)
    second.inbound(KEY).rewind(1)
    assert new.take_numbers(10) == list(range(4, 14))
    with pytest.raises(Fenced, match="forward-1 is taken by incarnation 3 now; this worker is incarnation 2"):
        old.take_numbers(30)  # it may still hold some
    assert new.take_numbers(16) == list(range(14, 30))


def test_what_was_put_before_anybody_listened_arrives(stack: ExitStack) -> None:
    producer, consumer = worker(stack, 1), worker(stack, 2)
    QueuePair(producer, consumer, 4).put(*range(20))
    assert line_of(producer, consumer).take_numbers(20) == list(range(20))


def test_whoever_waits_for_a_producer_that_is_not_there_sleeps(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[int] = []
    poll = zmq.zmq_poll

    def counted(sockets: list[tuple[Any, int]], timeout: int) -> list[tuple[Any, int]]:
        polls.append(timeout)
        return poll(sockets, timeout)

    monkeypatch.setattr(zmq, "zmq_poll", counted)
    consumer = worker(stack, 2)
    consumer.connect({KEY: f"tcp://127.0.0.1:{free_port()}"})
    for _ in range(3):
        assert consumer.inbound(KEY).take(0.1) is None
    assert len(polls) < 12


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
    line = QueuePair(producer, consumer, 4)
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
    monkeypatch.setattr(sockets, "UNANSWERED", 0.5)  # a damaged length can leave a connection stuck
    dice = random.Random(seed)
    producer, consumer = worker(stack, 1), worker(stack, 2)
    proxy = stack.enter_context(Proxy(producer.endpoint))
    consumer.connect({KEY: proxy.endpoint})
    line = QueuePair(producer, consumer, 4)
    line.put(0)
    line.take()
    proxy.change = flip = Flip(dice.randrange(2000), dice.randrange(8))
    payloads = [torch.randn(50) for _ in range(20)]
    for number, payload in enumerate(payloads, start=1):
        line.outbound.put(line.message(number, payload))
    assert all(torch.equal(line.take().payload, payload) for payload in payloads)
    assert flip.fired


def proxied(stack: ExitStack) -> tuple[QueuePair, Proxy, Callable[[], None]]:
    """A line, a proxy on its way, and what connects its consumer to that."""
    producer, consumer = worker(stack, 1), worker(stack, 2)
    proxy = stack.enter_context(Proxy(producer.endpoint))
    return QueuePair(producer, consumer, 4), proxy, lambda: consumer.connect({KEY: proxy.endpoint})


def test_a_connection_without_any_answer_is_made_anew(
    stack: ExitStack, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "UNANSWERED", 0.2)
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


GREETING = b"\xff" + 7 * b"\0" + b"\x01\x7f" + b"\x03\x00"  # ZeroMQ's, up to the name of a mechanism
GARBAGE = {
    "text, taken for ZeroMQ's first version": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" + 300 * b"z",
    "a mechanism that there is not": GREETING + b"GARBAGE".ljust(20, b"\0") + 32 * b"\0",
    "zeros": 100 * b"\0",
}


def once(proxy: Proxy, garbage: bytes) -> None:
    """What the first connection brings is `garbage`."""
    proxy.change = lambda passing: garbage if proxy.connections == 1 else passing


@pytest.fixture
def nobody_else_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `Handshake` can end a connection without a handshake, and soon."""
    monkeypatch.setitem(connection.COMMON_OPTIONS, zmq.HANDSHAKE_IVL, 600_000)
    monkeypatch.setattr(sockets, "UNANSWERED", 600.0)
    monkeypatch.setattr(sockets, "NO_HANDSHAKE", 0.2)


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_who_first_finds_somebody_who_does_not_speak_zeromq_connects_again(
    stack: ExitStack, nobody_else_hangs_up: None, garbage: bytes
) -> None:
    """ZeroMQ gives such a connection up and says nothing: half a minute went by until it was made anew."""
    line, proxy, connect = proxied(stack)
    line.put(0, 1)
    once(proxy, garbage)
    connect()
    assert line.take_numbers(2) == [0, 1]


def test_garbage_in_the_middle_of_a_connection_is_the_end_of_it(
    stack: ExitStack, nobody_else_hangs_up: None, hasty: None
) -> None:
    line, proxy, connect = proxied(stack)
    connect()
    line.put(0)
    line.take()
    once(proxy, 40 * b"\xff")
    line.put(*range(1, 5))
    assert line.take_numbers(4) == [1, 2, 3, 4]
    assert proxy.connections == 2


def test_events_of_a_connection_that_nobody_reads_stop_nothing(stack: ExitStack) -> None:
    """Two thousand of them, unread while a worker computed, would have filled a queue in which ZeroMQ waits for room:
    none of its sockets moved any more."""
    context = stack.enter_context(zmq.Context())
    router, friend, shown_out = (stack.enter_context(context.socket(k)) for k in (zmq.ROUTER, zmq.DEALER, zmq.DEALER))
    shown_out.set(zmq.RECONNECT_IVL, 1)
    stack.callback(Handshake(context, shown_out).close)
    door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    shown_out.connect(f"tcp://127.0.0.1:{door.getsockname()[1]}")
    friend.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    for _ in range(1500):
        door.accept()[0].close()
    friend.send(b"still here")
    assert router.poll(10_000)


def test_a_producer_of_another_run_is_refused_with_both_names(stack: ExitStack) -> None:
    consumer = worker(stack, 2)
    other = stack.enter_context(closing(ZeroMQQueues("other", 1, LOOPBACK, QueueOptions(microbatches=4, windows={}))))
    other.outbound(KEY)
    with pytest.raises(ForeignMessage, match="belongs to run 'other', this one to run 'line-run'"):
        line_of(other, consumer).take()


def test_a_producer_of_another_version_is_refused_with_both_versions(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = worker(stack, 1), worker(stack, 2)
    line = line_of(producer, consumer)
    monkeypatch.setattr(requests, "_VERSION", b"\x09")
    with pytest.raises(ForeignMessage, match="has version 9 of its requests, this one 1"):
        line.take()


def test_a_producer_of_another_plan_is_refused(stack: ExitStack) -> None:
    producer, consumer = worker(stack, 1, microbatches=6), worker(stack, 2)
    line = line_of(producer, consumer)
    for microbatch in range(5):
        producer.outbound(KEY).put(Message(RUN, KEY.flow, 0, microbatch, KEY.stage, 1, microbatch, None))
    line.take_numbers(4)
    with pytest.raises(ForeignMessage, match="not of this plan, which has 4 microbatches"):
        line.take()


def test_garbage_at_the_door_disturbs_nobody(stack: ExitStack) -> None:
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


def test_a_ring_from_another_thread_ends_a_wait(stack: ExitStack) -> None:
    producer, consumer = worker(stack, 1), worker(stack, 2)
    inbound = line_of(producer, consumer).inbound
    ringer = threading.Timer(0.05, consumer.ring)
    ringer.start()
    assert inbound.take(10_000) is None
    consumer.ring()
    consumer.pump(10_000)
    ringer.join()


def test_a_ring_from_a_signal_handler_ends_a_wait(stack: ExitStack) -> None:
    consumer = worker(stack, 2)
    before = signal.signal(signal.SIGALRM, lambda number, frame: consumer.ring())
    stack.callback(signal.signal, signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    assert consumer.inbound(KEY).take(10_000) is None


def test_a_ring_before_the_wait_is_not_lost_and_a_ring_after_close_is_nothing(stack: ExitStack) -> None:
    consumer = worker(stack, 2)
    for _ in range(1000):
        consumer.ring()
    assert consumer.inbound(KEY).take(10_000) is None
    consumer.close()
    consumer.ring()


def test_whoever_waits_serves_the_others(stack: ExitStack) -> None:
    """Two workers that both only ever take would starve each other if a take did not send what is due."""
    left, right = worker(stack, 1), worker(stack, 2)
    left.connect({BACK: right.endpoint})
    right.connect({KEY: left.endpoint})

    def play(me: ZeroMQQueues, mine: QueueKey, other: QueueKey) -> list[int]:
        for number in range(60):
            step, microbatch = divmod(number, 4)
            me.outbound(mine).put(Message(RUN, mine.flow, step, microbatch, mine.stage, 1, number, torch.ones(9)))
        return [wait_for(lambda: me.inbound(other).take(5)).sequence for _ in range(60)]

    results: list[list[int]] = []
    left_has_all = threading.Event()

    def play_right() -> None:
        results.append(play(right, BACK, KEY))
        while not left_has_all.is_set():
            right.pump(0.01)

    thread = threading.Thread(target=play_right)
    thread.start()
    results.append(play(left, KEY, BACK))
    left_has_all.set()
    while thread.is_alive():
        left.pump(0.01)
    assert results == [list(range(60))] * 2


def test_a_queue_within_one_worker_needs_no_socket(stack: ExitStack) -> None:
    queues = worker(stack, 1, local={KEY})
    line = QueuePair(queues, queues, 4)
    line.put(*range(5))
    assert line.take_numbers(5) == list(range(5))
    queues.ring()
    assert line.inbound.take(10_000) is None


def test_several_queues_share_one_connection(stack: ExitStack) -> None:
    keys = [QueueKey(flow, stage) for flow in Flow for stage in range(3)]
    windows = dict.fromkeys(keys, 3)
    producer, consumer = worker(stack, 1), worker(stack, 2, windows=windows)
    consumer.connect(dict.fromkeys(keys, producer.endpoint))
    for number in range(20):
        for key in keys:
            payload = torch.full((4,), float(number))
            step, microbatch = divmod(number, 4)
            producer.outbound(key).put(Message(RUN, key.flow, step, microbatch, key.stage, 1, number, payload))
    lines = {key: consumer.inbound(key) for key in keys}
    dice = random.Random(1)
    order = dice.sample(keys * 20, len(keys) * 20)
    taken: dict[QueueKey, list[int]] = {key: [] for key in keys}
    for key in order:

        def look(key: QueueKey = key) -> Message | None:
            producer.pump(0)
            return lines[key].take(0.01)

        taken[key].append(wait_for(look).sequence)
    assert all(numbers == list(range(20)) for numbers in taken.values())


def test_a_full_producer_waits_says_so_and_goes_on_when_there_is_room(stack: ExitStack) -> None:
    reasons: list[str] = []

    def waiting(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == 3:
            producer.outbound(KEY).trim(1)

    producer = worker(stack, 1, retain_bytes=5000, spill_bytes=0, waiting=waiting, patience=60.0)
    line = line_of(producer, worker(stack, 2))
    for number in range(5):
        line.outbound.put(line.message(number, torch.zeros(250)))
    assert len(reasons) == 3
    assert reasons[0].startswith("forward-1 retains 4 messages, ")
    line.inbound.rewind(1)
    assert line.take_numbers(1) == [4]


def test_what_was_spilled_to_the_disk_is_sent_again(stack: ExitStack, tmp_path: Path) -> None:
    producer = worker(stack, 1, retain_bytes=10_000, spill_bytes=10**6, spill_folder=str(tmp_path))
    line = line_of(producer, worker(stack, 2))
    payloads = [torch.randn(700) for _ in range(40)]
    for number, payload in enumerate(payloads):
        line.outbound.put(line.message(number, payload))
    assert line.outbound.depth().retained == 40
    for step in [0, 5, 0]:
        line.inbound.rewind(step)
        assert all(torch.equal(line.take().payload, payload) for payload in payloads[4 * step :])
    assert not list(tmp_path.iterdir())


def test_what_a_full_connection_does_not_take_is_sent_later(stack: ExitStack) -> None:
    producer = worker(stack, 1, windows={})  # with room for few messages on a connection
    consumer = worker(stack, 2, windows={KEY: 400})
    passing = threading.Event()
    passing.set()
    proxy = stack.enter_context(Proxy(producer.endpoint))
    proxy.change = lambda data: data if passing.wait(60) else b""
    consumer.connect({KEY: proxy.endpoint})
    line = QueuePair(producer, consumer, 4)
    line.settle()
    passing.clear()
    payload = torch.randn(50_000)
    for number in range(400):
        line.outbound.put(line.message(number, payload))
    assert 0 < line.outbound.depth().ready < 400
    passing.set()
    assert line.take_numbers(400) == list(range(400))


def test_queues_leave_nothing_open(tmp_path: Path) -> None:
    def use() -> None:
        with ExitStack() as stack:
            line = line_of(worker(stack, 1, retain_bytes=100), worker(stack, 2, f"ipc://{tmp_path}/socket"))
            line.put(0, 1, 2, 3)
            line.take_numbers(4)

    use()
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    use()
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_an_address_in_use_is_named(stack: ExitStack) -> None:
    first = worker(stack, 1)
    with pytest.raises(EndpointTaken, match=f"{first.endpoint}: it is in use by pid {os.getpid()}"):
        worker(stack, 2, first.endpoint)


def test_a_path_too_long_for_a_socket_is_named(stack: ExitStack, tmp_path: Path) -> None:
    with pytest.raises(EndpointTaken, match="a path may have 107 bytes at most"):
        worker(stack, 1, f"ipc://{tmp_path}/{'x' * 120}")


def test_an_inbound_queue_needs_a_window(stack: ExitStack) -> None:
    with pytest.raises(ValueError, match="no window is given for target-4; there is one for forward-1, backward-0"):
        worker(stack, 1).inbound(QueueKey(Flow.TARGET, 4))
