"""The first frame of a message: what it is, and what its other frames hold. docs/messages.md is its specification.

magic "SLMG" | wire version, u16 | Header, msgpack array | CRC-32 of all before, u32        (little-endian)
"""

import struct
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import prod
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from stageline.broker.errors import BadMessage, ForeignMessage, Unsendable
from stageline.pipeline.stage.layout import ALIGNMENT, Ints, layout

from .checksum import crc32
from .dtypes import DTYPES
from .structure import ONE_TENSOR, Outline, count_tensors

WIRE_VERSION = 1
MAGIC = b"SLMG"
MOST = 2**63 - 1

_PREFIX = struct.Struct("<4sH")
_CRC = struct.Struct("<I")
_PROLOGUE = _PREFIX.pack(MAGIC, WIRE_VERSION)

Frame: TypeAlias = bytes | memoryview  # a memoryview is one of bytes

_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
_Word = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class Flow(StrEnum):
    """What travels on a queue."""

    FORWARD = "forward"  # activations, from stage k-1 to stage k
    BACKWARD = "backward"  # gradients with respect to those activations, from stage k+1 to stage k
    TARGET = "target"  # targets from a user's own loader to the last stage

    __hash__ = str.__hash__  # an Enum's own is Python code, run for every look-up of a queue


@dataclass(frozen=True, slots=True)
class Limits:
    """What a receiver is willing to take; a sender refuses what would go beyond."""

    message_bytes: int = 2**32  # what the tensors of a message occupy, gaps between their elements included
    header_bytes: int = 2**20
    tensors: int = 4096
    ndim: int = 32
    depth: int = 16  # containers within containers


LIMITS = Limits()


class Identity(NamedTuple):
    """Messages of one identity have the same bits, whoever computed them."""

    run: str
    flow: Flow
    step: int
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.flow} message {self.step}/{self.microbatch} to stage {self.stage}"


class TensorHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """One tensor: `dtype` by its code, shape and strides in elements, the bytes of its frame and their CRC-32.

    `skew` is the address of its first element modulo 64: kernels choose by alignment too.
    """

    dtype: int
    shape: tuple[_Count, ...]
    strides: tuple[_Count, ...]
    requires_grad: bool
    nbytes: _Count
    crc32: _Word
    skew: _Count


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A message without its tensors' bytes. `stage` is the consumer's, `incarnation` the producer's."""

    run: str
    flow: Flow
    step: _Count
    microbatch: _Count
    stage: _Count
    incarnation: _Count
    sequence: _Count
    outline: Outline
    tensors: tuple[TensorHeader, ...]

    @property
    def identity(self) -> Identity:
        return Identity(self.run, self.flow, self.step, self.microbatch, self.stage)


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
    """The header of a first frame, with everything checked that can be before the tensors' bytes are here.

    Whoever has it may allocate what it asks for. Raises `BadMessage` naming what is wrong.
    """
    try:
        header = _decode(_body(memoryview(frame), limits))
    except (ValueError, RecursionError) as error:  # ValueError: msgspec's own errors, and invalid UTF-8
        raise BadMessage(f"the header is malformed: {error}") from error
    count = count_tensors(header.outline, limits.depth)
    if count != len(header.tensors):
        raise BadMessage(f"{header.identity} has {count} tensors in its outline and announces {len(header.tensors)}")
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
    """Two messages of one identity have the same bits if these are equal (as far as the tensors' CRC-32 can tell).

    Where the tensors lay in memory is left out: for a user's own arrays, that is the allocator's whim.
    """
    if len(header.tensors) == 1 and header.outline == ONE_TENSOR:
        (t,) = header.tensors
        return t.crc32, t.dtype, t.shape, t.strides, t.requires_grad
    return (
        _encode((header.outline, [(t.dtype, t.shape, t.strides, t.requires_grad, t.crc32) for t in header.tensors])),
    )


def _body(frame: memoryview, limits: Limits) -> memoryview:
    if not _PREFIX.size + _CRC.size < frame.nbytes <= limits.header_bytes:
        raise BadMessage(f"a header of {frame.nbytes} bytes, the limit is {limits.header_bytes}")
    magic, version = _PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise BadMessage(f"the header begins with {magic!r}, not with {MAGIC!r}: no message of ours")
    if crc32(frame[: -_CRC.size]) != _CRC.unpack_from(frame, frame.nbytes - _CRC.size)[0]:
        raise BadMessage("the header is damaged: its CRC-32 does not match")
    if version != WIRE_VERSION:
        raise ForeignMessage(
            f"the message has wire version {version}, this side speaks {WIRE_VERSION}; "
            "install the same version of stageline on every machine"
        )
    return frame[_PREFIX.size : -_CRC.size]


def _complaint(header: Header, limits: Limits) -> str | None:
    if len(header.tensors) > limits.tensors:
        return f"has {len(header.tensors)} tensors, the limit is {limits.tensors}"
    total = 0
    for number, t in enumerate(header.tensors):
        occupied = _occupied(t.dtype, t.shape, t.strides, t.nbytes, t.requires_grad, t.skew, limits.ndim)
        if type(occupied) is not int:
            return f"is wrong about tensor {number}: {occupied}"
        total += occupied
    if total > limits.message_bytes:
        return f"needs {total} bytes for its tensors and the gaps in them, the limit is {limits.message_bytes}"
    return None


@lru_cache(maxsize=1024)  # the same few tensors pass all day
def _occupied(
    code: int, shape: Ints, strides: Ints, nbytes: int, requires_grad: bool, skew: int, ndim: int
) -> int | str:
    """The bytes a tensor occupies at the receiver, or what is wrong with its header."""
    if len(shape) > ndim:
        return f"it has {len(shape)} dimensions, the limit is {ndim}"
    if len(strides) != len(shape):
        return f"it has {len(strides)} strides for {len(shape)} dimensions"
    dtype = DTYPES.get(code)
    if dtype is None:
        return f"dtype code {code} is unknown"
    if prod(size or 1 for size in shape) * dtype.itemsize > MOST:
        return f"shape {shape} has more elements than can be counted"
    form = layout(shape, strides)
    if form.extent is None:
        return f"elements of shape {shape} overlap with strides {strides}"
    if form.stored * dtype.itemsize != nbytes:
        return f"{nbytes} bytes are announced, shape and dtype need {form.stored * dtype.itemsize}"
    if skew >= ALIGNMENT or skew % dtype.itemsize:
        return f"a skew of {skew} bytes cannot be: it is below {ALIGNMENT} and a multiple of {dtype.itemsize}"
    if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        return f"{dtype} cannot require gradients"
    return form.extent * dtype.itemsize + skew
