"""The bytes of control messages: msgpack behind a seal (see `seal.py`).

What a worker says under an incarnation is sealed with the incarnation's secret, StopRun and Exited with the run's
control secret; who may say what is decided in `coordinator/authenticity.py`. What the broker sends to a worker is
sealed with the same secret of its incarnation (`coordinator/seals.py`); answers to commands are not sealed. No message
of one direction can be decoded as one of the other.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from stageline.broker.errors import BadMessage, ForeignMessage

from .channel import LARGEST_UNPROVEN
from .messages import CONTROL_VERSION, FromBroker, ToBroker
from .records import Count
from .seal import MessageSeal, opened, sealed


class _Speaker(msgspec.Struct):
    """Under which incarnation a message is said; what else it has is skipped."""

    incarnation: Count = 0


_encode = msgspec.msgpack.Encoder().encode
_speaker = msgspec.msgpack.Decoder(_Speaker)
_to_broker: "msgspec.msgpack.Decoder[ToBroker]" = msgspec.msgpack.Decoder(ToBroker)
_from_broker: "msgspec.msgpack.Decoder[FromBroker]" = msgspec.msgpack.Decoder(FromBroker)
_AnyMessage = TypeVar("_AnyMessage")


class SealedMessage(NamedTuple):
    """A message to the broker, and the seal that came with it."""

    message: ToBroker
    seal: MessageSeal


class SealedAnswer(NamedTuple):
    """A message from the broker, and the seal that came with it."""

    message: FromBroker
    seal: MessageSeal


def encode(message: ToBroker | FromBroker, secret: bytes = b"", serial: int = 0) -> bytes:
    """The bytes that travel, sealed with `secret` unless that is empty."""
    return sealed(_encode(message), secret, serial)


def decode_to_broker(
    frame: bytes, is_proven: Callable[[int, MessageSeal], bool] = lambda incarnation, seal: False
) -> SealedMessage:
    """Raises `BadMessage` if the frame is damaged, `ForeignMessage` if it is no message of this version.

    `is_proven`, of an incarnation and a seal, is asked before a long message is decoded: its content may take fifty
    times its bytes. Else the seal has not been looked at: `Authenticity` does.
    """
    body, seal = opened(frame)
    if len(body) > LARGEST_UNPROVEN and not is_proven(_decode(body, _speaker).incarnation, seal):
        raise BadMessage(f"a message of {len(body)} bytes proves nothing; it may have {LARGEST_UNPROVEN}")
    return SealedMessage(_decode(body, _to_broker), seal)


def decode_from_broker(frame: bytes) -> SealedAnswer:
    """Raises `BadMessage` if the frame is damaged, `ForeignMessage` if it is no message of this version."""
    body, seal = opened(frame)
    return SealedAnswer(_decode(body, _from_broker), seal)


def _decode(body: bytes, decoder: "msgspec.msgpack.Decoder[_AnyMessage]") -> _AnyMessage:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError that msgspec does not make its own
        raise ForeignMessage(f"this is not a message of control protocol version {CONTROL_VERSION}: {error}") from error
