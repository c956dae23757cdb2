"""The encoding of control messages: msgpack behind a seal.

A worker's messages under an incarnation are sealed with the incarnation's secret, StopRun and Exited with the run's
control secret; `coordinator/coordinator.py` decides who may say what. The broker seals its messages to a worker with
the secret of the worker's incarnation; answers to commands are not sealed. No message of one direction can be decoded
as one of the other.

    frame    CRC-32 of the rest, u32 | tag, 16 bytes | serial, u64 | body          little-endian
    tag      BLAKE2b of serial and body, keyed with a secret; 16 zero bytes: the message is not sealed
    serial   grows with every message that is sealed with one secret, so that a message sent again is known

The secrets are derived from the run's key, which only its broker has. A process that has a secret can prove what it
says; a process that has none cannot make a seal. A seal hides nothing: it does not encrypt.
"""

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec
from zlib_ng.zlib_ng import crc32

from stageline.broker.errors import BadMessage, ForeignMessage

from .channel import LARGEST_UNPROVEN
from .messages import (
    CONTROL_VERSION,
    MOST_STEPS,
    MOST_TIMES,
    Assigned,
    Failed,
    Finished,
    FromBroker,
    Goodbye,
    Hello,
    Report,
    ToBroker,
)
from .peek import Peeked
from .records import Count

KEY_BYTES = 32  # of a run's key, and of each secret
TAG_BYTES = 16
_SERIAL = slice(4 + TAG_BYTES, 4 + TAG_BYTES + 8)
_UNSEALED = bytes(TAG_BYTES)


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The secrets of one run, derived from its id and its key.

    Without a key, every secret is empty, and nothing can be proven.
    """

    run: str
    key: bytes = field(default=b"", repr=False)

    def of_incarnation(self, incarnation: int) -> bytes:
        """Return the secret that seals the messages between the broker and the worker of `incarnation`."""
        return self._derived(f"incarnation {incarnation}")

    def of_link(self, place: int, other: int, generation: int = 0) -> bytes:
        """Return the secret that two places share, from which the keys of the queues between them are derived.

        Args:
            place: One place.
            other: The other place.
            generation: Count of the keys that the run has had.
        """
        return self._derived(f"link {min(place, other)} {max(place, other)} {generation}")

    def of_place(self, index: int, generation: int = 0) -> bytes:
        """Return the secret key of a place's sockets, in a generation of keys."""
        return self._derived(f"place {index} {generation}")

    @property
    def salt(self) -> bytes:
        """Random bytes of the run's records, by which another run of the same name has other keys. Not a secret."""
        return self._derived("salt")

    @property
    def of_control(self) -> bytes:
        """The secret that seals the messages of the run's supervisor, and of its user's commands, to the broker."""
        return self._derived("control")

    def _derived(self, label: str) -> bytes:
        if not self.key:
            return b""
        return hashlib.blake2b(f"{self.run}\n{label}".encode(), key=self.key, digest_size=KEY_BYTES).digest()


@dataclass(frozen=True, slots=True)
class MessageSeal:
    """A received message's seal: its `tag`, made over the bytes `covered`, which begin with its `serial`."""

    tag: bytes
    serial: int
    covered: bytes = field(repr=False)

    def is_of(self, secret: bytes) -> bool:
        """Return True if the seal was made with `secret`. An empty secret makes no seal."""
        return bool(secret) and hmac.compare_digest(self.tag, _tag(secret, self.covered))


def sealed(body: bytes, secret: bytes = b"", serial: int = 0) -> bytes:
    """Return the frame of a message; it is not sealed if `secret` is empty.

    Args:
        body: The encoded message.
        secret: The key of the seal.
        serial: A number above those of earlier messages with this secret.
    """
    covered = serial.to_bytes(8, "little") + body
    rest = (_tag(secret, covered) if secret else _UNSEALED) + covered
    return crc32(rest).to_bytes(4, "little") + rest


def opened(frame: bytes) -> tuple[bytes, MessageSeal]:
    """Return the body and the seal of a frame, without a look at the seal.

    Raises `BadMessage` if the frame is damaged.
    """
    if len(frame) < _SERIAL.stop or crc32(frame[4:]) != int.from_bytes(frame[:4], "little"):
        raise BadMessage("a control message is damaged: its CRC-32 does not match")
    seal = MessageSeal(frame[4 : _SERIAL.start], int.from_bytes(frame[_SERIAL], "little"), frame[_SERIAL.start :])
    return frame[_SERIAL.stop :], seal


class Serials:
    """A memory of the serials received under one secret: each counts once."""

    def __init__(self, recent: int = 1) -> None:
        """Remember the `recent` highest serials.

        These may come in any order, as those of several processes that share a secret do. With 1, serials only rise.
        """
        self._recent = recent
        self._floor = -1
        self._seen: set[int] = set()

    def is_new(self, serial: int) -> bool:
        """Return True if `serial` has not come and is not older than those remembered; then note it as received."""
        if serial <= self._floor or serial in self._seen:
            return False
        self._seen.add(serial)
        if len(self._seen) >= self._recent:
            self._floor = min(self._seen)
            self._seen.remove(self._floor)
        return True


def _tag(secret: bytes, covered: bytes) -> bytes:
    return hashlib.blake2b(covered, key=secret, digest_size=TAG_BYTES).digest()


def is_full(steps: int, times: int) -> bool:
    """Return True if no more steps fit into a report with `steps` finished steps and `times` bytes of their times."""
    return steps >= MOST_STEPS or times >= MOST_TIMES


class _Speaker(msgspec.Struct):
    """A message's incarnation alone: the other fields are skipped."""

    incarnation: Count = 0


_encode = msgspec.msgpack.Encoder().encode
_speaker = msgspec.msgpack.Decoder(_Speaker)
_to_broker: "msgspec.msgpack.Decoder[ToBroker]" = msgspec.msgpack.Decoder(ToBroker)
_from_broker: "msgspec.msgpack.Decoder[FromBroker]" = msgspec.msgpack.Decoder(FromBroker)
_AnyMessage = TypeVar("_AnyMessage")


class SealedMessage(NamedTuple):
    """A message to the broker, with the seal that came with it."""

    message: ToBroker
    seal: MessageSeal


class SealedAnswer(NamedTuple):
    """A message from the broker, with the seal that came with it."""

    message: FromBroker
    seal: MessageSeal


def encode(message: ToBroker | FromBroker, secret: bytes = b"", serial: int = 0) -> bytes:
    """Return the frame of `message`, sealed with `secret` unless that is empty.

    Args:
        message: A message of either direction.
        secret: The key of the seal.
        serial: A number above those of earlier messages with this secret.
    """
    return sealed(_encode(message), secret, serial)


def decode_to_broker(
    frame: bytes, is_proven: Callable[[int, MessageSeal], bool] = lambda incarnation, seal: False
) -> SealedMessage:
    """Return a message to the broker, with its seal.

    The seal is looked at only for a long message, before its content is decoded, which may take fifty times its bytes.
    For all others, `Authenticity` judges the seal.

    Args:
        frame: The bytes received.
        is_proven: Returns True if a seal is that of an incarnation.

    Raises:
        BadMessage: The frame is damaged, or a long message proves nothing.
        ForeignMessage: The frame is no message of this version.
    """
    body, seal = opened(frame)
    if len(body) > LARGEST_UNPROVEN and not is_proven(_decode(body, _speaker).incarnation, seal):
        raise BadMessage(f"a message of {len(body)} bytes proves nothing; it may have {LARGEST_UNPROVEN}")
    return SealedMessage(_decode(body, _to_broker), seal)


def decode_from_broker(frame: bytes) -> SealedAnswer:
    """Return a message from the broker, with its seal, which has not been judged.

    Raises:
        BadMessage: The frame is damaged.
        ForeignMessage: The frame is no message of this version.
    """
    body, seal = opened(frame)
    return SealedAnswer(_decode(body, _from_broker), seal)


def _decode(body: bytes, decoder: "msgspec.msgpack.Decoder[_AnyMessage]") -> _AnyMessage:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError that msgspec does not make its own
        raise ForeignMessage(f"this is not a message of control protocol version {CONTROL_VERSION}: {error}") from error


class Sealer:
    """A process's maker of seals for what it sends, and judge of the seals on what it receives.

    A worker's messages are sealed under its incarnation's secret, and with that secret it checks what the broker says.
    A command's messages are sealed under the run's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin serials at the time of `clock`, in seconds since the epoch.

        They are then above those of any earlier process that had the same secret.
        """
        self._clock = clock
        self._serial = 0
        self._secrets: dict[int, bytes] = {}  # by incarnation
        self._heard = Serials()

    def learn(self, assigned: Assigned) -> None:
        """Take the secret that `assigned` brings: messages under its incarnation are sealed from now on."""
        if assigned.secret:
            self._secrets[assigned.incarnation] = assigned.secret

    def is_proven(self, seal: MessageSeal) -> bool:
        """Return True if the broker made the seal, and the message has not come before.

        A worker whose place came without a secret can prove nothing, and believes every message.
        """
        if not self._secrets:
            return True
        return any(map(seal.is_of, self._secrets.values())) and self._heard.is_new(seal.serial)

    def forget_serials(self) -> None:
        """Accept any serial again: another broker may answer, on a machine whose clock is behind."""
        self._heard = Serials()

    def worker_message(self, message: Hello | Report | Failed | Finished | Goodbye | Peeked) -> bytes:
        """Return the frame of a worker's message; it is not sealed if it is under no incarnation."""
        return self.sealed(message, self._secrets.get(message.incarnation, b""))

    def sealed(self, message: ToBroker, secret: bytes) -> bytes:
        """Return the frame of `message`, with the next serial; it is not sealed if `secret` is empty."""
        self._serial = max(self._serial + 1, int(self._clock() * 1e9))
        return encode(message, secret, self._serial)
