"""Processes of the same user that send garbage: it is refused, nothing stays open, and what is good still arrives."""

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stageline.broker.codec.message import Frame, encode
from stageline.broker.errors import BadMessage
from stageline.broker.queues.delivery import TOO_OFTEN
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.transports.sockets.shm_memory import SharedMemory, new_descriptor
from stageline.broker.transports.sockets.shm_producer import (
    COPIED,
    LARGEST,
    MEMORY,
    MESSAGE,
    NUMBER,
    PLACE,
    RANGE,
    REPLY,
    REQUEST,
    REQUESTS,
    preamble,
)
from stageline.broker.transports.sockets.shm_queues import ShmQueues
from support.queue_pair import KEY, LIMIT, RUN, QueuePair

SIZE = 2**20  # of the shared memory that is good
TERMS = QueueOptions(patience=0.0)


def worker(stack: ExitStack, incarnation: int, path: Path) -> ShmQueues:
    return stack.enter_context(closing(ShmQueues(RUN, incarnation, f"shm://{path}", TERMS)))


def listen(stack: ExitStack, path: Path) -> socket.socket:
    listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    listening.bind(str(path))
    listening.listen()
    return listening


def dial(stack: ExitStack, producer: ShmQueues) -> socket.socket:
    raw = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    raw.settimeout(LIMIT)
    raw.connect(producer.endpoint.removeprefix("shm://"))
    return raw


def send(raw: socket.socket, packet: bytes, descriptors: Sequence[int] = ()) -> None:
    """As far as the other end has not closed the connection. Closes the descriptors."""
    with suppress(OSError):
        socket.send_fds(raw, [packet], descriptors) if descriptors else raw.send(packet)
    for descriptor in descriptors:
        os.close(descriptor)


def empty_file() -> int:
    return os.memfd_create("empty")


def all_frames(queues: ShmQueues, number: int) -> list[Frame]:
    return encode(QueuePair(queues, queues).message(number, torch.arange(20_000)))


# --------------------------------------------------------------------------------- from a consumer, to a producer

FROM_CONSUMERS = {
    "an unknown kind": bytes([77]) + b"x" * 20,
    "a kind of a producer": bytes([MESSAGE]) + b"x" * 20,
    "a request without content": bytes([REQUEST]),
    "a request that is none": bytes([REQUEST]) + os.urandom(60),
    "a request as long as can be": bytes([REQUEST]) + b"x" * 100_000,
    "a short count": NUMBER.pack(COPIED, 1)[:-1],
    "a long count": NUMBER.pack(COPIED, 1) + b"x",
    "a count beyond what was sent": NUMBER.pack(COPIED, 1),
    "a wild count": NUMBER.pack(COPIED, 2**64 - 1),
    "nothing": b"",
}


@pytest.mark.parametrize("packet", FROM_CONSUMERS.values(), ids=FROM_CONSUMERS)
@pytest.mark.parametrize("descriptors", [0, 3])
def test_garbage_of_a_consumer_harms_no_other(
    nothing_left_open: None, stack: ExitStack, tmp_path: Path, packet: bytes, descriptors: int
) -> None:
    producer, consumer = worker(stack, 1, tmp_path / "1"), worker(stack, 2, tmp_path / "2")
    line = QueuePair(producer, consumer)
    raw = dial(stack, producer)
    consumer.connect({KEY: producer.endpoint})
    line.put(0)
    send(raw, packet, [empty_file() for _ in range(descriptors)])
    assert line.take_numbers(1) == [0]
    send(raw, packet)
    line.put(1)
    assert line.take_numbers(1) == [1]


@pytest.mark.parametrize("packet", [NUMBER.pack(COPIED, 1), NUMBER.pack(COPIED, 2**64 - 1), bytes([77])])
def test_a_consumer_that_breaks_the_protocol_is_disconnected(stack: ExitStack, tmp_path: Path, packet: bytes) -> None:
    """A wild count was believed: from then on no memory became free, and the queue stood still."""
    producer = worker(stack, 1, tmp_path / "1")
    raw = dial(stack, producer)
    send(raw, packet)
    producer.pump(0)
    assert raw.recv(1) == b""


def test_a_flood_of_requests_does_not_keep_a_producer_from_its_work(stack: ExitStack, tmp_path: Path) -> None:
    producer = worker(stack, 1, tmp_path / "1")
    raw = dial(stack, producer)
    raw.setblocking(False)
    sent = 0
    with suppress(BlockingIOError):
        while True:
            raw.send(bytes([REQUEST]))
            sent += 1
    assert sent > REQUESTS
    producer.pump(0)
    raw.send(bytes([REQUEST]))  # there is room again
    (connection,) = producer._listener._connections.values()
    assert connection.receive() == bytes([REQUEST]), "the rest waits for the next turn"


# --------------------------------------------------------------------------------- from a producer, to a consumer

CASES = {
    "an unknown kind": [(bytes([77]) + b"x" * 20, "")],
    "a kind of a consumer": [(bytes([REQUEST]) + b"x" * 20, "")],
    "a message without content": [(bytes([MESSAGE]), "")],
    "a message that is none": [(bytes([MESSAGE]) + b"x" * 50, "")],
    "a message whose header is none": [(bytes([MESSAGE]) + preamble([b"x" * 50]) + b"x" * 50, "")],
    "a message longer than a packet may be": [
        (bytes([MESSAGE]) + preamble([b"x" * 2 * LARGEST]) + b"x" * 2 * LARGEST, "")
    ],
    "a reply without content": [(bytes([REPLY]), "")],
    "a reply that is none": [(bytes([REPLY]) + b"x" * 60, "")],
    "a place without memory": [(RANGE.pack(PLACE, 0, 10), "")],
    "a place beyond the memory": [("memory", "m"), (RANGE.pack(PLACE, SIZE - 5, 10), "")],
    "a wild place": [("memory", "m"), (RANGE.pack(PLACE, 2**64 - 1, 2**64 - 1), "")],
    "a place where nothing is": [("memory", "m"), (RANGE.pack(PLACE, 10, 1000), "")],
    "a short place": [("memory", "m"), (RANGE.pack(PLACE, 0, 10)[:-1], "")],
    "memory without a descriptor": [("memory", "")],
    "memory with two descriptors": [("memory", "mm")],
    "memory with many descriptors": [("memory", "mmmmmm")],
    "memory in an empty file": [("memory", "e")],
    "memory in something that is no file": [("memory", "p")],
    "memory of a wild size": [(NUMBER.pack(MEMORY, 2**64 - 1), "m")],
    "memory of no size": [(NUMBER.pack(MEMORY, 0), "m")],
    "memory of a short size": [(NUMBER.pack(MEMORY, SIZE)[:-1], "m")],
    "a descriptor with a message": [(bytes([MESSAGE]) + b"x", "m")],
    "descriptors with a reply": [(bytes([REPLY]) + b"x", "mm")],
    "nothing": [(b"", "")],
    "nothing with descriptors": [(b"", "mm")],
}


def open_one(letter: str) -> int:
    if letter == "p":
        reading, writing = os.pipe()
        os.close(writing)
        return reading
    return new_descriptor(SIZE) if letter == "m" else empty_file()


@pytest.mark.parametrize("packets", CASES.values(), ids=CASES)
def test_garbage_of_a_producer_is_refused_and_a_good_one_in_its_place_is_believed(
    nothing_left_open: None, stack: ExitStack, tmp_path: Path, hasty: None, packets: list[tuple[bytes | str, str]]
) -> None:
    consumer = worker(stack, 2, tmp_path / "2")
    with ExitStack() as of_raw:
        listening = listen(of_raw, tmp_path / "1")
        consumer.connect({KEY: f"shm://{tmp_path}/1"})
        raw = of_raw.enter_context(listening.accept()[0])
        for packet, descriptors in packets:
            content = NUMBER.pack(MEMORY, SIZE) if isinstance(packet, str) else packet
            send(raw, content, [open_one(letter) for letter in descriptors])
        assert consumer.inbound(KEY).take(0.03) is None
    producer = worker(stack, 1, tmp_path / "1")
    line = QueuePair(producer, consumer)
    line.outbound.put(line.message(0, torch.arange(20_000)))
    assert torch.equal(line.take().payload, torch.arange(20_000))


def test_garbage_without_end_is_an_error_that_names_the_worker(stack: ExitStack, tmp_path: Path) -> None:
    consumer = worker(stack, 2, tmp_path / "2")
    listening = listen(stack, tmp_path / "1")
    consumer.connect({KEY: f"shm://{tmp_path}/1"})
    raw = stack.enter_context(listening.accept()[0])
    for _ in range(TOO_OFTEN + 1):
        send(raw, bytes([77]))
    with pytest.raises(BadMessage, match=rf"9 messages in a row from the worker at shm://{tmp_path}/1 arrived damaged"):
        consumer.inbound(KEY).take(LIMIT)


def test_a_damaged_message_in_shared_memory_is_sent_again(stack: ExitStack, tmp_path: Path, hasty: None) -> None:
    producer, consumer = worker(stack, 1, tmp_path / "1"), worker(stack, 2, tmp_path / "2")
    line = QueuePair(producer, consumer)
    consumer.connect({KEY: producer.endpoint})
    producer.outbound(KEY)
    line.settle()
    for number in range(3):
        line.outbound.put(line.message(number, torch.arange(20_000) + number))
    (connection,) = producer._listener._connections.values()
    assert connection._memory is not None
    connection._memory.write(1000, [b"damaged"])
    for number in range(3):
        assert torch.equal(line.take().payload, torch.arange(20_000) + number)


packets = st.one_of(
    st.binary(min_size=1, max_size=60),
    st.binary(max_size=60).map(lambda rest: bytes([MESSAGE]) + rest),
    st.lists(st.binary(max_size=20), min_size=1, max_size=4).map(
        lambda frames: bytes([MESSAGE]) + preamble(list(frames)) + b"".join(frames)
    ),
    st.binary(max_size=60).map(lambda rest: bytes([REPLY]) + rest),
    st.builds(RANGE.pack, st.just(PLACE), st.integers(0, 2 * SIZE), st.integers(0, 2 * SIZE)),
    st.builds(NUMBER.pack, st.just(MEMORY), st.sampled_from([SIZE, SIZE + 1, SIZE // 2, 2**63])),
    st.builds(NUMBER.pack, st.sampled_from([COPIED, MEMORY]), st.integers(0, 2**64 - 1)),
    st.just(b"good"),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(packets, st.sampled_from(["", "", "m", "e", "mm"])), max_size=12))
def test_no_packets_of_a_producer_raise_anything_but_bad_message(
    nothing_left_open: None, tmp_path: Path, packets: list[tuple[bytes, str]]
) -> None:
    with ExitStack() as stack:
        (tmp_path / "1").unlink(missing_ok=True)
        consumer = worker(stack, 2, tmp_path / "2")
        listening = listen(stack, tmp_path / "1")
        consumer.connect({KEY: f"shm://{tmp_path}/1"})
        raw = stack.enter_context(listening.accept()[0])
        frames = all_frames(consumer, 0)
        content = b"".join([preamble(frames), *frames])
        for packet, descriptors in packets:
            if packet == b"good":  # so that there is memory which later packets lie in
                descriptor = new_descriptor(SIZE)
                memory = SharedMemory(descriptor, SIZE)
                memory.write(0, [content])
                memory.close()
                send(raw, NUMBER.pack(MEMORY, SIZE), [descriptor])
                send(raw, RANGE.pack(PLACE, 0, len(content)))
            else:
                send(raw, packet, [open_one(letter) for letter in descriptors])
        with suppress(BadMessage):
            while (message := consumer.inbound(KEY).take(0)) is not None:
                assert torch.equal(message.payload, torch.arange(20_000))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(packets | st.binary(max_size=60).map(lambda rest: bytes([REQUEST]) + rest), max_size=12))
def test_no_packets_of_a_consumer_raise_anything(nothing_left_open: None, tmp_path: Path, packets: list[bytes]) -> None:
    with ExitStack() as stack:
        producer = worker(stack, 1, tmp_path / "1")
        line = QueuePair(producer, producer)
        raw = dial(stack, producer)
        for number, packet in enumerate(packets):
            send(raw, packet)
            line.put(number)
            producer.pump(0)
