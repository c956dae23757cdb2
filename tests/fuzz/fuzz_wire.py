"""Fuzzes all decoders of what comes over a wire: each input is decoded, or refused with BadMessage.

    make fuzz                                        a minute; Python 3.11 to 3.13 on Linux
    python -m fuzz.fuzz_wire -max_total_time=3600    an hour; further options are libFuzzer's
    python -m fuzz.fuzz_wire crash-1a2b3c            an input that was found, once more

Run it from the project's folder with PYTHONPATH=tests. Interesting inputs are kept in runs/fuzz/ for the next time.
"""

import contextlib
import hashlib
import sys
import warnings
import zlib
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["stageline"]):
    import torch

    from stageline.broker.codec.message import Flow, Limits, Message, decode, read_header
    from stageline.broker.codec.message import encode as frames_of
    from stageline.broker.control.messages import Report, Stop
    from stageline.broker.control.protocol import decode_from_broker, decode_to_broker, encode
    from stageline.broker.control.seal import sealed
    from stageline.broker.errors import BadMessage
    from stageline.broker.queues.redis.entries import read_credit
    from stageline.broker.queues.requests import (
        SEAL_BYTES,
        CreditRequest,
        RetentionReply,
        pack,
        run_named_in,
        unpack,
    )

KEPT = Path("runs") / "fuzz"
LIMITS = Limits(message_bytes=2**20, header_bytes=2**16)


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
        with contextlib.suppress(BadMessage):
            unpack(frame, kind)
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


TARGETS = (message, header, request, announcement, control)


def seeds() -> list[bytes]:
    """One valid input for each target."""
    payload = {"x": torch.arange(6.0).reshape(2, 3).t(), "mask": (torch.tensor([True]), None, 0.5, "é")}
    frames = [bytes(frame) for frame in frames_of(Message("run", Flow.FORWARD, 7, 2, 1, 3, 30, payload))]
    credit, retention = (
        CreditRequest("run", Flow.FORWARD, 1, 3, 9, 4, 8, False, True),
        RetentionReply("run", Flow.FORWARD, 1, 3, 9, 0, 4),
    )
    joined = b"".join(len(frame).to_bytes(2, "little") + frame for frame in frames)
    inputs = [
        (message, joined),
        (header, frames[0][:-4]),
        (request, pack(credit)[SEAL_BYTES:]),
        (request, pack(retention)[SEAL_BYTES:]),
        (announcement, b"1-1 4 8 -1"),
        (control, encode(Report(1, 5, "2F3 of step 7", 0.5, 0.5, snapshots=[(1, 20)]))[28:]),
        (control, encode(Stop("enough", 75))[28:]),
    ]
    return [bytes([TARGETS.index(target)]) + data for target, data in inputs]


def one(data: bytes) -> None:
    """The first byte chooses the target."""
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])


def _split(data: bytes) -> list[bytes]:
    frames = []
    while len(data) >= 2:
        length = int.from_bytes(data[:2], "little")
        frames.append(data[2 : 2 + length])
        data = data[2 + length :]
    return frames


def main() -> None:
    warnings.simplefilter("ignore")  # torch's, about complex32
    KEPT.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        one(seed)
        (KEPT / f"seed-{number}").write_bytes(seed)
    arguments = sys.argv if any(Path(argument).is_file() for argument in sys.argv[1:]) else [*sys.argv, str(KEPT)]
    atheris.Setup(arguments, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
