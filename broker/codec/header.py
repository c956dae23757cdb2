"""The first frame of a message: which message it is, and what its other frames hold.

    magic "SLMG" | wire version, u16 | Header, msgpack array | CRC-32 of all before, u32        (little-endian)

docs/messages.md is its specification.
"""

import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec

from stageline.broker.errors import BadMessage, ForeignMessage, Unsendable

from .checksum import crc32
from .structure import ONE_TENSOR, Structure, count_tensors
from .tensors import Count, TensorHeader, occupied_bytes

WIRE_VERSION = 1
MAGIC = b"SLMG"

_PREFIX = struct.Struct("<4sH")
_CRC = struct.Struct("<I")
_PROLOGUE = _PREFIX.pack(MAGIC, WIRE_VERSION)


class Flow(StrEnum):
    """What travels on a queue."""

    FORWARD = "forward"  # activations, from stage k-1 to stage k
    BACKWARD = "backward"  # gradients with respect to those activations, from stage k+1 to stage k
    TARGET = "target"  # targets from a user's own loader to the last stage

    __hash__ = str.__hash__  # an Enum's own is Python code, called for every look-up of a queue


@dataclass(frozen=True, slots=True)
class Limits:
    """What a receiver accepts; a sender applies the same limits to itself."""

    message_bytes: int = 2**32  # that the tensors of a message occupy, gaps between their elements included
    header_bytes: int = 2**20
    tensors: int = 4096
    ndim: int = 32
    depth: int = 16  # containers within containers


LIMITS = Limits()


class Identity(NamedTuple):
    """Messages of one identity have the same bits, whichever worker computed them."""

    run: str
    flow: Flow
    step: int
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.flow} message {self.step}/{self.microbatch} to stage {self.stage}"


class MessageInfo(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Which message it is. `stage` is the consumer's, `incarnation` the producer's, `sequence` counts from 0."""

    run: str
    flow: Flow
    step: Count
    microbatch: Count
    stage: Count
    incarnation: Count
    sequence: Count

    @property
    def identity(self) -> Identity:
        return Identity(self.run, self.flow, self.step, self.microbatch, self.stage)


class Header(MessageInfo, frozen=True):
    """A message without the bytes of its tensors."""

    structure: Structure
    tensors: tuple[TensorHeader, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Header).decode


def write_header(header: Header, *, limits: Limits = LIMITS) -> bytes:
    """The first frame. Raises `Unsendable` for what a receiver with these limits would refuse."""
    try:
        frame = _PROLOGUE + _encode(header)
    except (ValueError, OverflowError) as error:  # lone surrogates in a text, integers beyond 64 bits
        raise Unsendable(f"{header.identity} holds a value that cannot travel: {error}") from error
    complaint = _complaint(header, limits)
    if complaint:
        raise Unsendable(f"{header.identity} {complaint}")
    if len(frame) + _CRC.size > limits.header_bytes:
        raise Unsendable(f"{header.identity} has a header of {len(frame)} bytes, the limit is {limits.header_bytes}")
    return frame + _CRC.pack(crc32(frame))


def read_header(frame: bytes | memoryview, *, limits: Limits = LIMITS) -> Header:
    """The header of a first frame, with everything checked that can be checked without the other frames.

    The memory that it asks for may be allocated. Raises `BadMessage` naming what is wrong.
    """
    try:
        header = _decode(_body(memoryview(frame), limits))
    except (ValueError, RecursionError) as error:  # ValueError: msgspec's own errors, and invalid UTF-8
        raise BadMessage(f"the header is malformed: {error}") from error
    count = _tensor_count(header.structure, limits.depth)
    if count != len(header.tensors):
        raise BadMessage(f"{header.identity} has {count} tensors in its structure and announces {len(header.tensors)}")
    complaint = _complaint(header, limits)
    if complaint:
        raise BadMessage(f"{header.identity} {complaint}")
    return header


def check_run(header: Header, run: str) -> None:
    """Raises `ForeignMessage` naming both runs if the message is not of `run`."""
    if header.run != run:
        raise ForeignMessage(
            f"{header.identity} belongs to run {header.run!r}, this worker to run {run!r}; "
            "two runs share a queue address: give one of them another queues.url"
        )


def fingerprint(header: Header) -> tuple[object, ...]:
    """Equal for two messages of one identity if they have the same bits (as far as the tensors' CRC-32 can tell).

    The skews are left out: where a user's own arrays lie in memory may differ between two runs of the same code.
    """
    if len(header.tensors) == 1 and header.structure == ONE_TENSOR:
        (t,) = header.tensors
        return t.crc32, t.dtype, t.shape, t.strides, t.requires_grad
    return (
        _encode((header.structure, [(t.dtype, t.shape, t.strides, t.requires_grad, t.crc32) for t in header.tensors])),
    )


def _tensor_count(structure: Structure, depth: int) -> int:
    one = structure == ONE_TENSOR and type(structure[0]) is int  # `False` and `0.0` equal 0
    return 1 if one else count_tensors(structure, depth)


def _body(frame: memoryview, limits: Limits) -> memoryview:
    if not _PREFIX.size + _CRC.size < frame.nbytes <= limits.header_bytes:
        raise BadMessage(f"a header of {frame.nbytes} bytes, the limit is {limits.header_bytes}")
    magic, version = _PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise BadMessage(f"the header begins with {magic!r}, not with {MAGIC!r}: not a message of stageline")
    if crc32(frame[: -_CRC.size]) != _CRC.unpack_from(frame, frame.nbytes - _CRC.size)[0]:
        raise BadMessage("the header is damaged: its CRC-32 does not match")
    if version != WIRE_VERSION:
        raise ForeignMessage(
            f"the message has wire version {version}, this side has {WIRE_VERSION}; "
            "install the same version of stageline on every machine"
        )
    return frame[_PREFIX.size : -_CRC.size]


def _complaint(header: Header, limits: Limits) -> str | None:
    if len(header.tensors) > limits.tensors:
        return f"has {len(header.tensors)} tensors, the limit is {limits.tensors}"
    total = 0
    for number, t in enumerate(header.tensors):
        occupied = occupied_bytes(t.dtype, t.shape, t.strides, t.nbytes, t.requires_grad, t.skew, limits.ndim)
        if type(occupied) is not int:
            return f"is wrong about tensor {number}: {occupied}"
        total += occupied
    if total > limits.message_bytes:
        return f"needs {total} bytes for its tensors and the gaps in them, the limit is {limits.message_bytes}"
    return None
