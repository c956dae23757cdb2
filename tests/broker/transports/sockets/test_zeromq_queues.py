"""Queues over real sockets, real processes and a real network in between that breaks."""

import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from msgspec.structs import replace

from stageline.broker.codec.message import Message
from stageline.broker.errors import Fenced
from stageline.broker.transports.sockets.zeromq_queues import OPTIONS, ZeroMQQueues
from stageline.pipeline.program import Queue
from support.fork_server import ForkServer
from support.queue_pair import BACK, KEY, RUN, QueuePair, wait_for
from support.workspace import free_port
from support.zeromq_queues import LOOPBACK, line_of, producer_process, worker


def take_numbers(consumer: ZeroMQQueues, count: int) -> list[int]:
    """Takes from a producer in another process, and checks that each payload belongs to its number."""
    messages = [wait_for(lambda: consumer.inbound(KEY).take(1)) for _ in range(count)]
    assert all(torch.equal(message.payload, torch.full((3,), float(message.number))) for message in messages)
    return [message.number for message in messages]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_killed_producer_is_replaced_and_the_consumer_goes_on(
    stack: ExitStack, fork_server: ForkServer, tmp_path: Path, transport: str
) -> None:
    urls = [f"ipc://{tmp_path}/first", f"ipc://{tmp_path}/second"] if transport == "ipc" else [LOOPBACK] * 2
    consumer = worker(stack, 2, f"ipc://{tmp_path}/consumer")
    with producer_process(fork_server, urls[0], incarnation=1, step=0, end=40) as (endpoint, process):
        consumer.connect({KEY: endpoint})
        taken = take_numbers(consumer, 10)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    with producer_process(fork_server, urls[1], incarnation=3, step=1, end=100) as (endpoint, _):
        consumer.connect({KEY: endpoint})
        taken += take_numbers(consumer, 90)
    assert taken == list(range(100))


def test_an_address_that_cannot_be_dialled_leaves_no_socket_open(stack: ExitStack) -> None:
    """Its socket was left open, and `close` waited for it without end."""
    consumer = worker(stack, 2)
    with pytest.raises(zmq.ZMQError):
        consumer.connect({KEY: "tcp://nowhere"})
    consumer.close()


@pytest.mark.slow
def test_a_producer_may_come_back_at_the_same_address(
    stack: ExitStack, fork_server: ForkServer, tmp_path: Path, hasty: None
) -> None:
    url = f"ipc://{tmp_path}/producer"
    consumer = worker(stack, 2)
    consumer.connect({KEY: url})
    with producer_process(fork_server, url, incarnation=1, step=0, end=40) as (_, process):
        taken = take_numbers(consumer, 10)
        process.send_signal(signal.SIGKILL)
    with producer_process(fork_server, url, incarnation=3, step=2, end=40):
        taken += take_numbers(consumer, 30)
    assert taken == list(range(40))


def test_a_replacement_takes_over_and_the_stale_consumer_is_fenced(stack: ExitStack) -> None:
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


def test_what_was_put_before_a_consumer_connects_arrives(stack: ExitStack) -> None:
    producer, consumer = worker(stack, 1), worker(stack, 2)
    QueuePair(producer, consumer).put(*range(20))
    assert line_of(producer, consumer).take_numbers(20) == list(range(20))


def test_a_consumer_whose_producer_is_absent_sleeps(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_worker_that_waits_serves_its_other_queues(stack: ExitStack) -> None:
    """Two workers that both only ever take would starve each other if a take did not send what is due."""
    left, right = worker(stack, 1), worker(stack, 2)
    left.connect({BACK: right.endpoint})
    right.connect({KEY: left.endpoint})

    def play(me: ZeroMQQueues, mine: Queue, other: Queue) -> list[int]:
        for number in range(60):
            me.outbound(mine).put(Message(RUN, mine.name, number, 1, torch.ones(9)))
        return [wait_for(lambda: me.inbound(other).take(5)).number for _ in range(60)]

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
    queues = worker(stack, 1)
    line = QueuePair(queues, queues, replace(KEY, consumer=0))
    line.put(*range(5))
    assert line.take_numbers(5) == list(range(5))
    queues.ring()
    assert line.inbound.take(10_000) is None


def test_a_ring_ends_a_wait_at_once_where_another_thread_has_work(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that waits for a script's replies saw its next call up to 20 ms late."""
    monkeypatch.setitem(OPTIONS[zmq.DEALER], zmq.RCVTIMEO, -1)  # a wait at one socket alone has no end
    line = line_of(worker(stack, 1), worker(stack, 2, wakes_at_once=True))
    ringing = threading.Timer(0.05, line.consumer.ring)
    ringing.start()
    assert line.inbound.take(10_000) is None


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
