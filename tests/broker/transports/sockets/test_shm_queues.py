"""Queues over Unix sockets and shared memory: real sockets, and real processes that are killed."""

import errno
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from stageline.broker.errors import EndpointTaken, ForeignMessage
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.requests import CreditRequest, pack
from stageline.broker.transports.sockets import shm_producer as connection
from stageline.broker.transports.sockets import shm_producer as listener
from stageline.broker.transports.sockets import shm_queues as dialer
from stageline.broker.transports.sockets.shm_memory import new_descriptor
from stageline.broker.transports.sockets.shm_producer import MEMORY, NUMBER, REQUEST, ConsumerConnection
from stageline.broker.transports.sockets.shm_queues import Dialer, ShmQueues
from support.fork_server import ForkServer
from support.queue_pair import KEY, LIMIT, RUN, QueuePair, queue_of, wait_for
from support.shm_processes import payload_of, process

FEW = 6  # polls of a wait that sleeps


def worker(stack: ExitStack, incarnation: int, path: Path, **changed: Any) -> ShmQueues:
    terms = QueueOptions(**{"patience": 0.0, **changed})
    return stack.enter_context(closing(ShmQueues(RUN, incarnation, f"shm://{path}", terms)))


def line_in(stack: ExitStack, folder: Path, *, window: int = 8, **changed: Any) -> QueuePair:
    """A line whose consumer has granted its credit."""
    producer, consumer = worker(stack, 1, folder / "1"), worker(stack, 2, folder / "2", **changed)
    queue = queue_of("forward-1", window=window)
    consumer.connect({queue: producer.endpoint})
    line = QueuePair(producer, consumer, queue)
    assert isinstance(producer.outbound(queue).depth().ready, int)  # made: credit for it is not kept, but used
    line.settle()
    return line


def dialer_of(queues: ShmQueues) -> Dialer:
    (found,) = queues._links.values()
    return found


def put_sizes(line: QueuePair, sizes: list[int]) -> None:
    """Messages whose payloads have so many bytes, each its own content."""
    for number, size in enumerate(sizes):
        line.outbound.put(line.message(number, payload_of(number, size // 4)))


def take_sizes(line: QueuePair, sizes: list[int]) -> None:
    """Checks the messages of `put_sizes`: order and every bit."""
    for number, size in enumerate(sizes):
        message = line.take()
        assert message.number == number
        assert torch.equal(message.payload, payload_of(number, size // 4))


# ------------------------------------------------------------------------------------------ messages of all sizes

KB, MB = 2**10, 2**20
SIZES = {
    "40 KB": [40 * KB] * 60,
    "1 MB": [MB] * 20,
    "growing": [KB * 2**number for number in range(13)] + [4 * MB] * 3,
    "shrinking": [4 * MB, MB, 100 * KB, 33 * KB, KB, 4] * 3,
    "alternating": [1 * KB, 700 * KB] * 12,
    "around the limit of a packet": [*range(2**15 - 400, 2**15 + 400, 20)],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("window", [1, 3, 64])
def test_messages_of_all_sizes_arrive_with_the_same_bits_and_in_order(
    stack: ExitStack, tmp_path: Path, sizes: list[int], window: int
) -> None:
    line = line_in(stack, tmp_path, window=window)
    put_sizes(line, sizes)
    take_sizes(line, sizes)


def test_memory_is_shared_anew_only_when_messages_grow(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[int] = []
    new = connection.new_descriptor

    def counted(size: int) -> int:
        shared.append(size)
        return new(size)

    monkeypatch.setattr(connection, "new_descriptor", counted)
    sizes = [40 * KB] * 8 + [MB] * 8 + [40 * KB] * 8 + [MB] * 8
    line = line_in(stack, tmp_path)
    put_sizes(line, sizes)
    take_sizes(line, sizes)
    first, second = shared
    assert first == connection.LEAST
    assert connection.MESSAGES * MB <= second < (connection.MESSAGES + 1) * MB


# -------------------------------------------------------------------------------------- looking before it sleeps


def test_a_look_finds_messages_and_the_end_of_the_connection(stack: ExitStack, tmp_path: Path) -> None:
    line = line_in(stack, tmp_path)
    dialer = dialer_of(line.consumer)

    def arrivals() -> int:
        count = 0
        while dialer.has_arrived():
            dialer.receive(monotonic())
            count += 1
        return count

    arrivals()  # a reply to its request, perhaps
    line.outbound.put(line.message(0, payload_of(0, 1)))
    line.outbound.put(line.message(1, payload_of(1, 1)))
    assert arrivals() == 2
    line.producer.close()
    assert arrivals() == 1
    assert dialer.handle is None


# ---------------------------------------------------------------------------------------- a consumer that is behind


@pytest.mark.parametrize("size", [30 * KB, 300 * KB])
def test_a_consumer_that_takes_nothing_does_not_block_its_producer(
    stack: ExitStack, tmp_path: Path, polls: list[float], size: int
) -> None:
    """Its socket, or its memory, is full: what is due stays due, and loses nothing."""
    line = line_in(stack, tmp_path, window=64)
    sizes = [size] * 40
    put_sizes(line, sizes)
    depth = line.outbound.depth()
    assert depth.ready > 0
    assert depth.in_flight > 0
    assert depth.ready + depth.in_flight == 40
    polls.clear()
    assert line.producer.wait_for(lambda: None, 0.2) is None
    assert len(polls) < FEW
    take_sizes(line, sizes)


def test_a_producer_that_has_nothing_to_send_any_more_does_not_wait_for_room(
    stack: ExitStack, tmp_path: Path, polls: list[float]
) -> None:
    """Its socket was full, and then had room: each wait ended at once, since nothing more was sent."""
    producer = worker(stack, 1, tmp_path / "1")
    line = QueuePair(producer, producer)
    with raw_consumer(producer) as raw:
        raw.send(
            bytes([REQUEST]) + pack(CreditRequest(RUN, KEY.name, 2, 1, next=0, credit=64, resend=False, ask=False))
        )
        put_sizes(line, [30 * KB] * 40)
        assert line.outbound.depth().ready > 0
        line.outbound.trim(10)
        while True:
            try:
                raw.recv(2**16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
        polls.clear()
        assert producer.wait_for(lambda: None, 0.2) is None
        assert len(polls) < FEW


def test_a_consumer_whose_request_finds_no_room_sleeps_until_there_is_some(
    stack: ExitStack, tmp_path: Path, polls: list[float], hasty: None
) -> None:
    """Its producer has been stopped for long: each wait ended at once, since a request was due."""
    consumer = worker(stack, 2, tmp_path / "2")
    with raw_producer(tmp_path / "1") as listening:
        consumer.connect({KEY: f"shm://{tmp_path}/1"})
        raw = stack.enter_context(listening.accept()[0])
        filled = 0
        while dialer_of(consumer)._transmit(b"full"):
            filled += 1
        assert filled > 10
        consumer.inbound(KEY).rewind(0)
        polls.clear()
        assert consumer.inbound(KEY).take(0.3) is None
        assert len(polls) < FEW
        received = [raw.recv(KB) for _ in range(filled + 1)]
        assert received[0][0] == REQUEST
        assert set(received[1:]) == {b"full"}
        consumer.pump(LIMIT)
        assert raw.recv(KB)[0] == REQUEST


def test_a_consumer_whose_producer_is_absent_sleeps(stack: ExitStack, tmp_path: Path, polls: list[float]) -> None:
    consumer = worker(stack, 2, tmp_path / "2")
    consumer.connect({KEY: f"shm://{tmp_path}/1"})
    for _ in range(3):
        assert consumer.inbound(KEY).take(0.1) is None
    assert len(polls) < 12


def test_a_consumer_whose_producer_hangs_up_at_once_connects_ever_more_rarely(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = worker(stack, 2, tmp_path / "2")
    pauses: list[float] = []
    with raw_producer(tmp_path / "1") as listening:
        consumer.connect({KEY: f"shm://{tmp_path}/1"})
        dialer = dialer_of(consumer)
        now = monotonic()
        for _ in range(8):
            listening.accept()[0].close()
            while dialer.receive(now):
                pass
            pauses.append(dialer.due - now)
            now = dialer.due
            dialer.send_requests(now)
    assert pauses == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0])


def test_a_ring_ends_a_wait_at_once(stack: ExitStack, tmp_path: Path) -> None:
    line = line_in(stack, tmp_path)
    ringing = threading.Timer(0.05, line.consumer.ring)
    ringing.start()
    assert line.inbound.take(10_000) is None
    ringing.join()


# ------------------------------------------------------------------------------------ processes that are killed


def take_from_process(consumer: ShmQueues, count: int, elements: int) -> list[int]:
    messages = [wait_for(lambda: consumer.inbound(KEY).take(1)) for _ in range(count)]
    assert all(torch.equal(message.payload, payload_of(message.number, elements)) for message in messages)
    return [message.number for message in messages]


@pytest.mark.slow
@pytest.mark.parametrize("elements", [3, 100_000])
@pytest.mark.parametrize("path", ["1", "3"])
def test_a_killed_producer_is_replaced_and_the_consumer_goes_on(
    stack: ExitStack, fork_server: ForkServer, tmp_path: Path, elements: int, path: str
) -> None:
    consumer = worker(stack, 2, tmp_path / "2")
    with process(fork_server, "produce", f"shm://{tmp_path}/1", 1, 0, 40, elements) as first:
        consumer.connect({KEY: first.stdout.readline().strip()})
        taken = take_from_process(consumer, 10, elements)
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    with process(fork_server, "produce", f"shm://{tmp_path}/{path}", 3, 1, 60, elements) as second:
        consumer.connect({KEY: second.stdout.readline().strip()})
        taken += take_from_process(consumer, 50, elements)
    assert taken == list(range(60))


@pytest.mark.slow
@pytest.mark.parametrize("elements", [3, 100_000])
def test_a_killed_consumer_is_replaced_and_gets_everything_from_its_step_on(
    stack: ExitStack, fork_server: ForkServer, tmp_path: Path, elements: int
) -> None:
    producer, replacement = worker(stack, 1, tmp_path / "1"), worker(stack, 3, tmp_path / "3")
    line = QueuePair(producer, replacement)
    put_sizes(line, [4 * elements] * 40)
    with process(fork_server, "consume", f"shm://{tmp_path}/2", 2, producer.endpoint) as consumer:
        while producer.outbound(KEY).depth().ready > 25:
            producer.pump(LIMIT)
        consumer.send_signal(signal.SIGKILL)
        assert consumer.wait() == -signal.SIGKILL
        taken = [int(number) for number in consumer.stdout.read().split()]
    assert taken == list(range(len(taken)))
    replacement.connect({KEY: producer.endpoint})
    take_sizes(line, [4 * elements] * 40)
    assert len(producer._listener._connections) == 1


def test_what_a_producer_sent_before_it_closed_is_received_though_requests_were_unread(
    stack: ExitStack, tmp_path: Path
) -> None:
    """The system reports that connection as reset before it gives out what is in it."""
    line = line_in(stack, tmp_path)
    put_sizes(line, [KB, 100 * KB, KB, 100 * KB])
    line.inbound.requester.introduce()
    dialer_of(line.consumer).send_requests(monotonic())
    line.producer.close()
    for number, size in enumerate([KB, 100 * KB, KB, 100 * KB]):
        message = line.inbound.take(LIMIT)
        assert message is not None
        assert torch.equal(message.payload, payload_of(number, size // 4))


def test_a_producer_that_comes_back_at_its_path_is_found_again(stack: ExitStack, tmp_path: Path) -> None:
    line = line_in(stack, tmp_path)
    put_sizes(line, [100 * KB] * 4)
    take_sizes(line, [100 * KB] * 2)
    line.producer.close()
    again = QueuePair(worker(stack, 3, tmp_path / "1"), line.consumer)
    put_sizes(again, [100 * KB] * 8)
    assert [again.take().number for _ in range(6)] == [2, 3, 4, 5, 6, 7]


def test_a_consumer_that_moves_leaves_no_connection_behind(stack: ExitStack, tmp_path: Path) -> None:
    line = line_in(stack, tmp_path)
    put_sizes(line, [100 * KB] * 2)
    take_sizes(line, [100 * KB] * 2)
    other = worker(stack, 3, tmp_path / "3")
    line.consumer.connect({KEY: other.endpoint})
    line.producer.pump(0)
    assert not line.producer._listener._connections
    moved = QueuePair(other, line.consumer)
    put_sizes(moved, [100 * KB] * 4)
    assert moved.take_numbers(2) == [2, 3]


# ------------------------------------------------------------------------------------------------- addresses


def test_the_socket_of_a_dead_process_is_replaced_and_that_of_a_live_one_refused(
    stack: ExitStack, tmp_path: Path
) -> None:
    refusal = f"{tmp_path}/1: it is in use by pid {os.getpid()}; stop that process"
    with raw_producer(tmp_path / "1"), pytest.raises(EndpointTaken, match=refusal):
        worker(stack, 1, tmp_path / "1")
    assert (tmp_path / "1").is_socket(), "it was left behind"
    line = line_in(stack, tmp_path)
    line.put(0)
    assert line.take_numbers(1) == [0]


def test_a_path_that_is_too_long_is_refused_with_the_way_out(
    nothing_left_open: None, stack: ExitStack, tmp_path: Path
) -> None:
    with pytest.raises(EndpointTaken, match="a path may have 107 bytes at most; use a shorter one"):
        worker(stack, 1, tmp_path / ("x" * 108))


def test_a_folder_that_does_not_exist_is_refused_with_the_way_out(
    nothing_left_open: None, stack: ExitStack, tmp_path: Path
) -> None:
    with pytest.raises(EndpointTaken, match="the folder does not exist; make it first"):
        worker(stack, 1, tmp_path / "none" / "1")


def test_an_endpoint_of_other_queues_is_refused_by_name_and_changes_nothing(stack: ExitStack, tmp_path: Path) -> None:
    line = line_in(stack, tmp_path)
    with pytest.raises(
        ForeignMessage, match=rf"at tcp://127.0.0.1:5600, this one's at shm://{tmp_path}/2; set the same"
    ):
        line.consumer.connect({KEY: "tcp://127.0.0.1:5600"})
    line.put(0, 1)
    assert line.take_numbers(2) == [0, 1]


def test_only_this_user_may_connect(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = worker(stack, 1, tmp_path / "1"), worker(stack, 2, tmp_path / "2")
    line = QueuePair(producer, consumer)
    line.put(0)
    with monkeypatch.context() as patched:
        patched.setattr(listener, "user_of", lambda socket: os.geteuid() + 1)
        consumer.connect({KEY: producer.endpoint})
        producer.pump(0)
        assert not producer._listener._connections
        assert consumer.inbound(KEY).take(0.1) is None
    assert line.take_numbers(1) == [0]
    assert os.stat(tmp_path / "1").st_mode & 0o777 == 0o600


def test_a_worker_takes_nothing_from_a_process_of_another_user(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = worker(stack, 1, tmp_path / "1"), worker(stack, 2, tmp_path / "2")
    line = QueuePair(producer, consumer)
    line.put(0)
    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(dialer, "user_of", lambda socket: 12345)
        consumer.connect({KEY: producer.endpoint})
        assert consumer.inbound(KEY).take(0.1) is None
    reason = f"a process of user 12345 listens there, and this one is of user {os.geteuid()}"
    assert {each["reason"] for each in logs} == {reason}
    assert line.take_numbers(1) == [0]


@pytest.mark.parametrize("room", [2304, 2**14])
def test_a_message_that_the_systems_socket_buffer_has_no_room_for_goes_through_shared_memory(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """`net.core.wmem_default` may be that small."""

    def with_small_buffer(end: socket.socket) -> ConsumerConnection:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
        return ConsumerConnection(end)

    monkeypatch.setattr(listener, "ConsumerConnection", with_small_buffer)
    line = line_in(stack, tmp_path)
    sizes = [1, 300, 1000, 5000, 8100, 10]
    put_sizes(line, sizes)
    take_sizes(line, sizes)


# ------------------------------------------------------------------------------ descriptors and memory run out


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_producer_without_descriptors_accepts_later_and_sleeps_until_then(
    nothing_left_open: None, stack: ExitStack, tmp_path: Path, polls: list[float]
) -> None:
    producer, consumer = worker(stack, 1, tmp_path / "1"), worker(stack, 2, tmp_path / "2")
    line = QueuePair(producer, consumer)
    line.put(0)
    consumer.connect({KEY: producer.endpoint})
    with no_descriptors():
        assert producer.wait_for(lambda: None, 0.2) is None
        assert len(polls) < FEW
        assert not producer._listener._connections
    there = line.message(0)
    assert producer.wait_for(lambda: there if producer._listener._connections else None, LIMIT) is there
    assert line.take_numbers(1) == [0]


def test_a_consumer_without_descriptors_connects_later(
    nothing_left_open: None, stack: ExitStack, tmp_path: Path, polls: list[float]
) -> None:
    producer, consumer = worker(stack, 1, tmp_path / "1"), worker(stack, 2, tmp_path / "2")
    line = QueuePair(producer, consumer)
    line.put(0)
    with no_descriptors():
        consumer.connect({KEY: producer.endpoint})
        assert consumer.inbound(KEY).take(0.1) is None
        assert len(polls) < FEW
    assert line.take_numbers(1) == [0]


def test_a_consumer_that_gets_no_descriptor_of_the_memory_gets_it_over_a_new_connection(
    nothing_left_open: None, stack: ExitStack, tmp_path: Path
) -> None:
    """The system drops a descriptor for which there is no room: no long message could be read any more."""
    line = line_in(stack, tmp_path)
    sizes = [KB] + [100 * KB] * 6
    put_sizes(line, sizes)
    with no_descriptors():
        message = line.inbound.take(1)
        assert message is not None
        assert message.number == 0
        assert line.inbound.take(0.1) is None
    for number, size in [*enumerate(sizes)][1:]:
        message = line.take()
        assert message.number == number
        assert torch.equal(message.payload, payload_of(number, size // 4))


def refuse(*_: object) -> int:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_a_producer_without_memory_to_share_says_so_and_goes_on_when_there_is_some(
    nothing_left_open: None, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hasty: None
) -> None:
    line = line_in(stack, tmp_path)
    producer = line.producer
    assert isinstance(producer, ShmQueues)
    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", refuse)
        put_sizes(line, [100 * KB] * 6)
        assert line.inbound.take(0.1) is None
        trouble = producer.trouble
        assert trouble is not None
        assert trouble.reason == "the system gives no shared memory for messages: Cannot allocate memory"
        producer.pump(0)
        assert producer.trouble == trouble, "since when it is"
    take_sizes(line, [100 * KB] * 6)
    assert producer.trouble is None


def test_the_trouble_of_a_consumer_that_is_gone_is_gone_too(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = line_in(stack, tmp_path)
    producer = line.producer
    assert isinstance(producer, ShmQueues)
    monkeypatch.setattr(os, "memfd_create", refuse)
    put_sizes(line, [100 * KB])
    assert producer.trouble is not None
    line.consumer.close()
    producer.pump(0)
    assert producer.trouble is None


def test_old_memory_serves_when_there_is_no_larger(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = line_in(stack, tmp_path)
    sizes = [100 * KB, 900 * KB, 900 * KB]
    put_sizes(line, sizes[:1])
    take_sizes(line, sizes[:1])
    line.settle()
    monkeypatch.setattr(os, "memfd_create", refuse)
    for number in (1, 2):
        line.outbound.put(line.message(number, payload_of(number, sizes[number] // 4)))
    assert [line.take().number for _ in range(2)] == [1, 2]
    assert line.producer.trouble is None


def test_queues_leave_nothing_open(nothing_left_open: None, tmp_path: Path) -> None:
    with ExitStack() as stack:
        line = line_in(stack, tmp_path)
        put_sizes(line, [KB, 100 * KB, 2 * MB, KB])
        take_sizes(line, [KB, 100 * KB, 2 * MB])


# -------------------------------------------------------------------------------------------------- raw peers


@contextmanager
def raw_producer(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen()
        yield listening


@contextmanager
def raw_consumer(producer: ShmQueues) -> Iterator[socket.socket]:
    """Connected, and accepted."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(producer.endpoint.removeprefix("shm://"))
        producer.pump(0)
        assert len(producer._listener._connections) == 1
        yield raw


def test_another_run_at_the_same_path_is_told_so(stack: ExitStack, tmp_path: Path) -> None:
    producer = worker(stack, 1, tmp_path / "1")
    terms = QueueOptions()
    with closing(ShmQueues("other-run", 2, f"shm://{tmp_path}/2", terms)) as consumer:
        consumer.connect({KEY: producer.endpoint})
        producer.pump(LIMIT)
        with pytest.raises(ForeignMessage, match="belongs to run 'line-run', this one to run 'other-run'"):
            consumer.inbound(KEY).take(LIMIT)


def test_memory_in_the_middle_of_messages_replaces_the_former(
    nothing_left_open: None, stack: ExitStack, tmp_path: Path
) -> None:
    consumer = worker(stack, 2, tmp_path / "2")
    with raw_producer(tmp_path / "1") as listening:
        consumer.connect({KEY: f"shm://{tmp_path}/1"})
        raw = stack.enter_context(listening.accept()[0])
        for _ in range(100):
            descriptor = new_descriptor(10)
            socket.send_fds(raw, [NUMBER.pack(MEMORY, 10)], [descriptor])
            os.close(descriptor)
            assert consumer.inbound(KEY).take(0) is None
        assert len([each for each in os.listdir("/proc/self/fd") if is_memory(each)]) == 1


def is_memory(number: str) -> bool:
    path = f"/proc/self/fd/{number}"
    return os.path.lexists(path) and "memfd:stageline" in os.readlink(path)
