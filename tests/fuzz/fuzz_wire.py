"""Fuzzes all decoders of what comes over a wire: each input is decoded, or refused with BadMessage.

    make fuzz                                        a minute; Python 3.11 to 3.13 on Linux
    python -m fuzz.fuzz_wire -max_total_time=3600    an hour; further options are libFuzzer's
    python -m fuzz.fuzz_wire crash-1a2b3c            an input that was found, once more

Run it from the project's folder with PYTHONPATH=tests. Interesting inputs are kept in runs/fuzz/ for the next time.
"""

import contextlib
import hashlib
import logging
import socket
import sys
import tempfile
import warnings
import zlib
from pathlib import Path

import atheris
import structlog

with atheris.instrument_imports(include=["stageline"]):
    import torch

    from stageline.broker.codec.message import Limits, Message, decode, read_header
    from stageline.broker.codec.message import encode as frames_of
    from stageline.broker.control.messages import Report, Stop
    from stageline.broker.control.protocol import decode_from_broker, decode_to_broker, encode, sealed
    from stageline.broker.errors import BadMessage, BrokerError
    from stageline.broker.queues.delivery import Receiver
    from stageline.broker.queues.links import RouteGone
    from stageline.broker.queues.requests import (
        SEAL_BYTES,
        CreditRequest,
        Requester,
        RetentionReply,
        pack,
        run_named_in,
        unpack,
    )
    from stageline.broker.transports.redis.entries import read_credit
    from stageline.broker.transports.sockets.shm_memory import SharedMemory, new_descriptor
    from stageline.broker.transports.sockets.shm_producer import (
        COPIED,
        MEMORY,
        MESSAGE,
        NUMBER,
        PLACE,
        RANGE,
        REPLY,
        REQUEST,
        ConsumerConnection,
        Listener,
        preamble,
    )
    from stageline.broker.transports.sockets.shm_queues import Dialer
    from stageline.broker.transports.sockets.shm_queues import split as split_content
    from stageline.pipeline.program import Queue

QUEUE_KEYS = {"forward-1": b"k" * 32}
KEPT = Path("runs") / "fuzz"
LIMITS = Limits(message_bytes=2**20, header_bytes=2**16)
SHARED_BYTES = 2**16
SHARED = new_descriptor(SHARED_BYTES)
LISTENER = Listener(f"shm://{tempfile.mkdtemp()}/fuzz", "run")


def message(data: bytes) -> None:
    """Frames of a message, each after its length."""
    with contextlib.suppress(BadMessage):
        decode(list(_split(data)), limits=LIMITS)


def header(data: bytes) -> None:
    """A header whose checksum is right, so that what follows it is reached."""
    with contextlib.suppress(BadMessage):
        read_header(data + zlib.crc32(data).to_bytes(4, "little"), limits=LIMITS)


def request(data: bytes) -> None:
    frame = hashlib.blake2b(data, digest_size=SEAL_BYTES).digest() + data
    for kind in (CreditRequest, RetentionReply):
        for keys in ({}, QUEUE_KEYS):
            with contextlib.suppress(BadMessage):
                unpack(frame, kind, keys)
    with contextlib.suppress(BadMessage):
        run_named_in(frame)


def announcement(data: bytes) -> None:
    key, _, rest = data.partition(b" ")
    with contextlib.suppress(BadMessage):
        read_credit([key, [b"w", rest, b"c", b"%d" % zlib.crc32(data)]])


def control(data: bytes) -> None:
    for decode_control in (decode_to_broker, decode_from_broker):
        with contextlib.suppress(BadMessage):
            decode_control(sealed(data))


def content(data: bytes) -> None:
    """The frames of a message in one piece, as a packet or shared memory holds them."""
    with contextlib.suppress(BadMessage):
        frames = split_content(memoryview(data))
        assert sum(map(len, frames)) + len(preamble(frames)) == len(data)


def from_producer(data: bytes) -> None:
    """Packets to a consumer, each after its length, beside shared memory that holds the same bytes."""
    dialer = Dialer("shm://nothing", "run")
    dialer.add(Requester("run", 1, Receiver(Queue(name="forward-1", producer=0, consumer=1, window=8))))
    dialer._memory = SharedMemory(SHARED, SHARED_BYTES)
    dialer._memory.write(0, [data[:SHARED_BYTES]])
    with contextlib.closing(dialer), contextlib.suppress(BrokerError):  # of a reply, also `Fenced` or `QueueGap`
        for packet in filter(None, _split(data)):
            descriptors = [SHARED] if packet[0] == MEMORY else []
            dialer._take_in_packet(memoryview(packet), descriptors, 0.0)


def from_consumer(data: bytes) -> None:
    """Packets to a producer, each after its length."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = ConsumerConnection(ours)
    with contextlib.closing(connection), theirs, contextlib.suppress(RouteGone):
        for packet in filter(None, _split(data)):
            theirs.send(packet)
            LISTENER._receive(b"route", connection)


TARGETS = (message, header, request, announcement, control, content, from_producer, from_consumer)


def seeds() -> list[bytes]:
    """One valid input for each target."""
    payload = {"x": torch.arange(6.0).reshape(2, 3).t(), "mask": (torch.tensor([True]), None, 0.5, "é")}
    frames = [bytes(frame) for frame in frames_of(Message("run", "forward-1", 30, 3, payload))]
    credit, retention = (
        CreditRequest("run", "forward-1", 3, 9, 4, 8, False, True),
        RetentionReply("run", "forward-1", 3, 9, 0, 4),
    )
    joined, whole = _join(frames), b"".join([preamble(frames), *frames])
    packets = [bytes([MESSAGE]) + whole, bytes([REPLY]) + pack(retention), NUMBER.pack(MEMORY, SHARED_BYTES)]
    packets += [RANGE.pack(PLACE, 3, len(whole))]  # of the first packet, in shared memory
    requests = [bytes([REQUEST]) + pack(credit), NUMBER.pack(COPIED, 0)]
    inputs = [
        (message, joined),
        (header, frames[0][:-4]),
        (request, pack(credit)[SEAL_BYTES:]),
        (request, pack(retention)[SEAL_BYTES:]),
        (announcement, b"1-1 4 8 -1"),
        (control, encode(Report(1, 5, "2F3 of step 7", 0.5, 0.5, snapshots=[(1, 20)]))[28:]),
        (control, encode(Stop("enough", 75))[28:]),
        (content, whole),
        (from_producer, _join(packets)),
        (from_consumer, _join(requests)),
    ]
    return [bytes([TARGETS.index(target)]) + data for target, data in inputs]


def one(data: bytes) -> None:
    """The first byte chooses the target."""
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])


def _join(parts: list[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(2, "little") + part for part in parts)


def _split(data: bytes) -> list[bytes]:
    frames = []
    while len(data) >= 2:
        length = int.from_bytes(data[:2], "little")
        frames.append(data[2 : 2 + length])
        data = data[2 + length :]
    return frames


def main() -> None:
    warnings.simplefilter("ignore")  # torch's, about complex32
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    KEPT.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        one(seed)
        (KEPT / f"seed-{number}").write_bytes(seed)
    arguments = sys.argv if any(Path(argument).is_file() for argument in sys.argv[1:]) else [*sys.argv, str(KEPT)]
    atheris.Setup(arguments, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
