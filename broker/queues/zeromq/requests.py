"""What the two ends of a queue say to each other beside its messages.

    consumer -> producer   Take       from which message on to send, and how far
    producer -> consumer   Standing   an answer to a `Take` that asks: what has been sent, what can be had

A frame: CRC-32 of the rest, u32 little-endian | version, u8 | msgpack array.
"""

from typing import Annotated, TypeVar

import msgspec

from ..checksum import checked, sealed
from ..errors import BadMessage, ForeignMessage
from ..header import MOST
from ..message import Flow
from ..queue import QueueKey

VERSION = 1

_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class _Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    run: str
    flow: Flow
    stage: _Count
    incarnation: _Count  # Take: the consumer's; Standing: the newest consumer's that the producer has heard of
    serial: _Count  # of the Take; counts what one consumer says, so that the newest is known

    @property
    def key(self) -> QueueKey:
        return QueueKey(self.flow, self.stage)


class Take(_Request, frozen=True):
    """All messages before `next` have arrived; the producer may send those before `credit`.

    `resend`: what was sent from `next` on is lost, send it again. `ask`: answer with a `Standing`.
    """

    next: _Count
    credit: _Count
    resend: bool
    ask: bool


class Standing(_Request, frozen=True):
    """Messages before `first` are forgotten; those before `sent` went out ahead of this, over this connection."""

    first: _Count
    sent: _Count


_encode = msgspec.msgpack.Encoder().encode
_decode_take = msgspec.msgpack.Decoder(Take)
_decode_standing = msgspec.msgpack.Decoder(Standing)
_VERSION = bytes([VERSION])
_AnyRequest = TypeVar("_AnyRequest", Take, Standing)


def pack(request: Take | Standing) -> bytes:
    return sealed(_VERSION + _encode(request))


def unpack_take(frame: bytes) -> Take:
    """Raises `BadMessage` if the frame is damaged, `ForeignMessage` if it has another version."""
    return _unpack(frame, _decode_take)


def unpack_standing(frame: bytes) -> Standing:
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
