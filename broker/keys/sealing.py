"""Sealing of what a queue's two ends leave with a server: the server learns sizes, times and places, and nothing else.

Each sealing of a message draws 24 random bytes, the salt, and derives a key of its own: HKDF (RFC 5869) makes a root of
the queue's secret, for the queue's whole context and what the key is for, and its second half, HKDF-Expand, the key of
that root and the salt. So the pieces are encrypted with a counter as iv (AES-256-GCM, NIST SP 800-38D), and a message
that is put again has the same identity and another ciphertext:

    header    start | iv 0: length of the header, u32; the header; padding
    start     magic "SLSE" | life, u64 | salt | total, u32 | CRC-32 of all before
    piece 1   iv 1: the first bytes of the tensors, which lie one after another
    piece 2   iv 2: the next, ... up to piece `total`, with padding at its end

Associated data are the message's number, the place of the piece, and their total, so that pieces are in no other place,
no other message and no other sealing, and none is missing. The header opens alone: the checksums that it holds, by
which messages are compared, are inside. Life is made of the context: a key of another life need not be known, to tell
its messages from damaged ones. Who alters it can only have a message put again, or hold it up, as who deletes it can.

A text, such as an announcement, is sealed likewise: step, u64 | salt | iv 0: the text. Its name is associated data.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from zlib_ng.zlib_ng import crc32

from stageline.broker.errors import BadMessage

from .single_use import SALT, TAG, RandomBytes, key_of, opened, root_of, sealed

SECRET = 32  # bytes of a queue's secret
PIECE = 2**20  # bytes of a sealed piece, but for the last one

SEALED_MAGIC = b"SLSE"
_START = struct.Struct(f">4sQ{SALT}sI")
_PLACE = struct.Struct(">QII")
_U32 = struct.Struct(">I")
_TEXT = struct.Struct(f">Q{SALT}s")
HEADER_SURPLUS = _START.size + 2 * _U32.size + TAG  # bytes by which a header is longer, padding aside

Frame: TypeAlias = bytes | memoryview  # a memoryview is one of bytes


class Purpose(StrEnum):
    """Use of a key that is derived from a queue's secret. The two ends of a queue never use the same key."""

    MESSAGES = "messages"
    KEPT = "kept"  # announcements of the producer
    TAKEN = "taken"  # announcements of the consumer
    DIGESTS = "digests"


@dataclass(frozen=True, slots=True)
class QueueContext:
    """Place of a queue that no other queue has, in this run, in any other, and in one of the same name.

    Attributes:
        salt: Random bytes of the run, from its records.
        run: Id of the run.
        queue: Name of the queue.
        producer: Worker that puts the messages.
        consumer: Worker that takes them.
        restart: Newest incarnation of the ended life of the run, 0 before it was first resumed as a whole.
        generation: Count of the secrets that the queue has had in this life of the run.
    """

    salt: bytes
    run: str
    queue: str
    producer: int
    consumer: int
    restart: int = 0
    generation: int = 0

    @property
    def life(self) -> int:
        """Number that grows with each secret of the queue."""
        return self.restart + self.generation

    def encoded(self, purpose: Purpose) -> bytes:
        """Return the context and the purpose as bytes that no other context and purpose have."""
        place = (self.run, self.queue, self.producer, self.consumer, self.restart, self.generation)
        return msgspec.msgpack.encode(("stageline", 1, purpose, self.salt, *place))


@dataclass(frozen=True, slots=True)
class QueueSecret:
    """Secret of a queue in one generation, which its two ends share, and the context in which keys are derived from it.

    Attributes:
        context: Context of the queue.
        secret: 32 random bytes. They are not shown.
    """

    context: QueueContext
    secret: bytes = field(repr=False)
    _roots: dict[Purpose, bytes] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Raise `ValueError` if the secret does not have 32 bytes."""
        if len(self.secret) != SECRET:
            raise ValueError(f"the secret of {self.context.queue} has {len(self.secret)} bytes, expected {SECRET}")

    def key(self, purpose: Purpose, salt: bytes = b"") -> bytes:
        """Return the key for a purpose, 32 bytes; with a salt, that of one sealing. Safe to call from any thread."""
        root = self._roots.get(purpose)
        if root is None:
            root = self._roots[purpose] = root_of(self.secret, self.context.encoded(purpose))
        return key_of(root, salt)


@dataclass(frozen=True, slots=True)
class Sealing:
    """Sealing of messages and texts with the secrets of one queue.

    Attributes:
        secret_at: Returns the secret for a step, at both ends the same.
        random: Source of the salts.
        is_padded: True to hide lengths among others, by 12 % at most (Padmé: Nikitin et al., 2019, section 4).
    """

    secret_at: Callable[[int], QueueSecret] = field(repr=False)  # called for each message: it makes no new object
    random: RandomBytes = field(repr=False)
    is_padded: bool = False

    def seal(self, step: int, number: int, frames: Sequence[Frame]) -> list[Frame]:
        """Return the frames of a message, sealed: a header, and pieces of `PIECE` bytes, the last one shorter.

        Args:
            step: Step of the message.
            number: Number of the message in its queue.
            frames: Header of the message, and the bytes of each tensor.
        """
        salt = self.random(SALT)
        secret = self.secret_at(step)
        cipher = AESGCM(secret.key(Purpose.MESSAGES, salt))
        contents = list(_cut([*frames[1:], bytes(self._padding(sum(map(len, frames[1:]))))], PIECE - TAG))
        total = len(contents)
        start = _START.pack(SEALED_MAGIC, secret.context.life, salt, total)
        header = _U32.pack(len(frames[0])) + bytes(frames[0]) + bytes(self._padding(len(frames[0])))
        first = start + _U32.pack(crc32(start)) + cipher.encrypt(_iv(0), header, _PLACE.pack(number, 0, total))
        pieces = [_sealed(cipher, content, number, place, total) for place, content in enumerate(contents, start=1)]
        return [first, *pieces]

    def open(self, step: int, number: int, header: Frame) -> "OpenedMessage | None":
        """Return the message of a sealed header, of which only the header is opened.

        Args:
            step: Step of the message.
            number: Number under which the message lies in its queue.
            header: First of the frames that `seal` returned.

        Returns:
            None for a message of another life of the queue's keys, such as before the run was resumed as a whole.

        Raises:
            BadMessage: The header is not sealed, is damaged, or is sealed with another key.
        """
        secret, name = self.secret_at(step), f"message {number}"
        magic, life, salt, total = _start(header, name)
        if magic != SEALED_MAGIC:
            raise BadMessage(f"the header of {name} begins with {magic!r}, not with {SEALED_MAGIC!r}: it is not sealed")
        if life != secret.context.life:
            return None
        cipher = AESGCM(secret.key(Purpose.MESSAGES, salt))
        opened = _opened(cipher, header[_START.size + _U32.size :], number, 0, total)
        length, padded = _U32.unpack_from(opened)[0], opened[_U32.size :]
        if length > len(padded):
            raise BadMessage(f"the sealed header of {name} announces {length} bytes and has {len(padded)}")
        return OpenedMessage(padded[:length], number, total, cipher)

    def seal_text(self, purpose: Purpose, step: int, name: bytes, text: bytes) -> bytes:
        """Return `text`, sealed.

        Args:
            purpose: Use of the text; only the same use opens it.
            step: Step whose secret seals it.
            name: Place of the text, which is known to who opens it.
            text: Bytes to seal.
        """
        start = _TEXT.pack(step, self.random(SALT))
        return start + sealed(self._text_key(purpose, start), start + name, text)

    def open_text(self, purpose: Purpose, name: bytes, text: bytes) -> bytes:
        """Return a text that `seal_text` sealed, for the same purpose and under the same name. Raises `BadMessage`."""
        if len(text) < _TEXT.size + TAG:
            raise BadMessage(f"{purpose}: a sealed text of {len(text)} bytes is cut off")
        start = text[: _TEXT.size]
        try:
            return opened(self._text_key(purpose, start), start + name, text[_TEXT.size :])
        except InvalidTag as error:
            raise BadMessage(
                f"{purpose}: a text cannot be opened: it is damaged, or sealed with another key"
            ) from error

    def _text_key(self, purpose: Purpose, start: bytes) -> bytes:
        step, salt = _TEXT.unpack(start)
        return self.secret_at(step).key(purpose, salt)

    def _padding(self, size: int) -> int:
        return padme(size) - size if self.is_padded else 0


@dataclass(frozen=True, slots=True)
class OpenedMessage:
    """Message of which the header is open, and the tensors' bytes are not.

    Attributes:
        header: Header of the message.
        number: Number of the message in its queue.
        total: Number of its pieces.
    """

    header: bytes = field(repr=False)
    number: int
    total: int
    _cipher: AESGCM = field(repr=False)

    def whole(self, piece: Frame, size: int) -> bytes:
        """Return the first `size` bytes of a message of one piece, for tensors that are sooner copied than filled.

        Raises `BadMessage`.
        """
        self._check(1, len(piece) - TAG, size)
        content = _opened(self._cipher, piece, self.number, 1, self.total)
        return content if len(content) == size else content[:size]

    def fill(self, buffers: Sequence[memoryview], pieces: Sequence[Frame]) -> None:
        """Open the pieces into `buffers`, one after another; what is more is padding.

        A piece that lies in one buffer is decrypted there, and not copied. Raises `BadMessage`.
        """
        self._check(len(pieces), sum(len(piece) - TAG for piece in pieces), sum(map(len, buffers)))
        rest = [buffer for buffer in reversed(buffers) if len(buffer)]
        for place, piece in enumerate(pieces, start=1):
            self._fill_with(piece, place, rest)

    def _check(self, count: int, size: int, room: int) -> None:
        """Raise `BadMessage` unless `count` pieces of `size` bytes are what tensors of `room` bytes are sealed to."""
        if count != self.total:
            raise BadMessage(f"message {self.number} came with {count} sealed pieces, not {self.total}")
        if not room <= size <= padme(room):
            raise BadMessage(f"{size} bytes came sealed for {room} bytes of tensors")

    def _fill_with(self, piece: Frame, place: int, rest: list[memoryview]) -> None:
        """Open a piece into the first of the buffers `rest`, of which the last comes first; filled ones are removed."""
        size = len(piece) - TAG
        if rest and 0 <= size <= len(rest[-1]):
            buffer = rest.pop()
            _open_into(self._cipher, piece, (self.number, place, self.total), buffer[:size])
            if size < len(buffer):
                rest.append(buffer[size:])
            return
        pour_into(rest, _opened(self._cipher, piece, self.number, place, self.total))


def pour_into(rest: list[memoryview], data: Frame) -> None:
    """Copy `data` into the buffers `rest`, of which the last comes first; filled ones are removed."""
    content = memoryview(data)
    while content and rest:
        buffer = rest.pop()
        count = min(len(content), len(buffer))
        buffer[:count] = content[:count]
        content = content[count:]
        if count < len(buffer):
            rest.append(buffer[count:])


def padme(size: int) -> int:
    """Return the length that hides `size` among others, 12 % more at most (Padmé: Nikitin et al., 2019, section 4)."""
    if size < 2:
        return size
    exponent = size.bit_length() - 1
    mask = (1 << (exponent - exponent.bit_length())) - 1
    return (size + mask) & ~mask


def sealed_size(size: int) -> int:
    """Return the most bytes of the sealed pieces of tensors that have `size` bytes."""
    padded = padme(size)
    return padded + TAG * -(-padded // (PIECE - TAG))


def _cut(frames: Sequence[Frame], size: int) -> Iterator[Frame]:
    """Yield the bytes of the frames in pieces of `size`, the last one shorter. A piece within one frame is a view."""
    begun: list[Frame] = []
    room = size
    for frame in frames:
        content = memoryview(frame)
        while content:
            begun.append(content[:room])
            content = content[room:]
            room -= len(begun[-1])
            if not room:
                yield _joined(begun)
                begun, room = [], size
    if begun:
        yield _joined(begun)


def _joined(parts: Sequence[Frame]) -> Frame:
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _start(header: Frame, name: str) -> tuple[bytes, int, bytes, int]:
    """Return what stands before the sealed part of a header. Raises `BadMessage` if it is cut off or damaged."""
    if len(header) < HEADER_SURPLUS:
        raise BadMessage(f"the header of {name} is not sealed, or cut off: it has {len(header)} bytes")
    if crc32(header[: _START.size]) != _U32.unpack_from(header, _START.size)[0]:
        raise BadMessage(f"the header of {name} is not sealed, or damaged: the CRC-32 of its start does not match")
    magic, restart, salt, total = _START.unpack_from(header)
    return magic, restart, salt, total


def _iv(place: int) -> bytes:
    return place.to_bytes(12, "big")


def _sealed(cipher: AESGCM, content: Frame, number: int, place: int, total: int) -> memoryview:
    buffer = bytearray(len(content) + TAG)
    cipher.encrypt_into(_iv(place), content, _PLACE.pack(number, place, total), buffer)
    return memoryview(buffer)


def _opened(cipher: AESGCM, sealed: Frame, number: int, place: int, total: int) -> bytes:
    try:
        return cipher.decrypt(_iv(place), sealed, _PLACE.pack(number, place, total))
    except InvalidTag as error:
        raise _unopened(number, place, total) from error


def _open_into(cipher: AESGCM, sealed: Frame, at: tuple[int, int, int], buffer: memoryview) -> None:
    number, place, total = at
    try:
        cipher.decrypt_into(_iv(place), sealed, _PLACE.pack(*at), buffer)
    except InvalidTag as error:
        raise _unopened(number, place, total) from error


def _unopened(number: int, place: int, total: int) -> BadMessage:
    part = f"piece {place} of {total}" if place else "the header"
    return BadMessage(f"{part} of message {number} cannot be opened: it is damaged, or sealed with another key")
