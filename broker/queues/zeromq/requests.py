"""What the two ends of a queue say to each other beside its messages.

    consumer -> producer   Take       from which message on to send, and how far
    producer -> consumer   Standing   an answer to a `Credit` that asks: what has been sent, what can be had

A frame: CRC-32 of the rest, u32 little-endian | version, u8 | msgpack array.
"""

from typing import TypeVar

import msgspec

from stageline.broker.codec.checksum import checked, sealed
from stageline.broker.codec.message import Flow
from stageline.broker.codec.tensors import Count
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.broker.queues.base import QueueKey

VERSION = 1


class _Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    run: str
    flow: Flow
    stage: Count
    incarnation: Count  # Take: the consumer's; Standing: the newest consumer's that the producer has heard of
    serial: Count  # of the Take; counts what one consumer says, so that the newest is known

    @property
    def key(self) -> QueueKey:
        return QueueKey(self.flow, self.stage)


class Credit(_Request, frozen=True):
    """All messages before `next` have arrived; the producer may send those before `credit`.

    `resend`: what was sent from `next` on is lost, send it again. `ask`: answer with a `Retention`.
    """

    next: Count
    credit: Count
    resend: bool
    ask: bool


class Retention(_Request, frozen=True):
    """Messages before `first` are forgotten; those before `sent` went out ahead of this, over this connection."""

    first: Count
    sent: Count


_encode = msgspec.msgpack.Encoder().encode
_decode_take = msgspec.msgpack.Decoder(Credit)
_decode_standing = msgspec.msgpack.Decoder(Retention)
_VERSION = bytes([VERSION])
_AnyRequest = TypeVar("_AnyRequest", Credit, Retention)


def pack(request: Credit | Retention) -> bytes:
    return sealed(_VERSION + _encode(request))


def unpack_credit(frame: bytes) -> Credit:
    """Raises `BadMessage` if the frame is damaged, `ForeignMessage` if it has another version."""
    return _unpack(frame, _decode_take)


def unpack_retention(frame: bytes) -> Retention:
    """Raises `BadMessage` if the frame is damaged, `ForeignMessage` if it has another version."""
    return _unpack(frame, _decode_standing)


def _unpack(frame: bytes, decoder: "msgspec.msgpack.Decoder[_AnyRequest]") -> _AnyRequest:
    body = checked(frame)
    if not body:
        raise BadMessage("a request between queue ends is damaged: its CRC-32 does not match")
    if body[0] != VERSION:
        raise ForeignMessage(
            f"the other end of a queue speaks version {body[0]} of its requests, this one {VERSION}; "
            "install the same version of stageline on every machine"
        )
    try:
        return decoder.decode(body[1:])
    except ValueError as error:  # msgspec's own errors, and invalid UTF-8
        raise BadMessage(f"a request between queue ends is malformed: {error}") from error
