"""The first frame of a message: what it is, and what its other frames hold. docs/messages.md is its specification.

magic "SLMG" | wire version, u16 | Header, msgpack array | CRC-32 of all before, u32        (little-endian)
"""

import struct
import zlib
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import prod
from typing import Annotated, NamedTuple

import msgspec
import torch

from .errors import BadMessage
from .layout import Ints, block_size
from .tree import ONE_TENSOR, Node, count_tensors

WIRE_VERSION = 1
MAGIC = b"SLMG"
MOST = 2**63 - 1

# The codes are part of the wire format: never reused, never renumbered.
DTYPES: dict[int, torch.dtype] = {
    1: torch.bool,
    2: torch.uint8,
    3: torch.int8,
    4: torch.uint16,
    5: torch.int16,
    6: torch.uint32,
    7: torch.int32,
    8: torch.uint64,
    9: torch.int64,
    10: torch.float16,
    11: torch.bfloat16,
    12: torch.float32,
    13: torch.float64,
    14: torch.complex32,
    15: torch.complex64,
    16: torch.complex128,
    17: torch.float8_e4m3fn,
    18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2,
    20: torch.float8_e5m2fnuz,
    21: torch.float8_e8m0fnu,
    22: torch.float4_e2m1fn_x2,
}

_PREFIX = struct.Struct("<4sH")
_CRC = struct.Struct("<I")
_PROLOGUE = _PREFIX.pack(MAGIC, WIRE_VERSION)

_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
_Word = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class Flow(StrEnum):
    """What travels on a queue."""

    FORWARD = "forward"  # activations, from stage k-1 to stage k
    BACKWARD = "backward"  # gradients with respect to those activations, from stage k+1 to stage k
    TARGET = "target"  # targets from a user's own loader to the last stage


@dataclass(frozen=True, slots=True)
class Limits:
    """What a receiver is willing to take; a sender refuses what would go beyond."""

    message_bytes: int = 2**32  # all frames together
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
    """One tensor: shape and strides in elements, `nbytes` and CRC-32 of its frame."""

    dtype: int  # a code of DTYPES
    shape: tuple[_Count, ...]
    strides: tuple[_Count, ...]
    requires_grad: bool
    nbytes: _Count
    crc32: _Word


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A message without its tensors' bytes. `stage` is the consumer's, `incarnation` the producer's."""

    run: str
    flow: Flow
    step: _Count
    microbatch: _Count
    stage: _Count
    incarnation: _Count
    sequence: _Count
    tree: Node
    tensors: tuple[TensorHeader, ...]

    @property
    def identity(self) -> Identity:
        return Identity(self.run, self.flow, self.step, self.microbatch, self.stage)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Header).decode


def write_header(header: Header) -> bytes:
    """The first frame. Raises `ValueError` or `OverflowError` for a number or text that msgpack cannot hold."""
    frame = _PROLOGUE + _encode(header)
    return frame + _CRC.pack(zlib.crc32(frame))


def read_header(frame: bytes | memoryview, *, limits: Limits = LIMITS) -> Header:
    """The header of a first frame, with everything checked that can be before the tensors' bytes are here.

    Whoever has it may allocate what it asks for. Raises `BadMessage` naming what is wrong.
    """
    try:
        header = _decode(_checked_body(memoryview(frame), limits))
    except (ValueError, RecursionError) as error:  # ValueError: msgspec's own errors, and invalid UTF-8
        raise BadMessage(f"the header is malformed: {error}") from error
    _check_numbers(header, limits)
    for number, tensor in enumerate(header.tensors):
        complaint = _check_tensor(tensor, limits)
        if complaint:
            raise BadMessage(f"tensor {number} of {header.identity}: {complaint}")
    return header


def check_run(header: Header, run: str) -> None:
    """Raises `BadMessage` naming both runs if the message is not of `run`."""
    if header.run != run:
        raise BadMessage(
            f"{header.identity} belongs to run {header.run!r}, this worker to run {run!r}; "
            "two runs share a queue address: give one of them another queues.url"
        )


def fingerprint(header: Header) -> bytes:
    """Equal for two messages of one identity if and only if their bits are equal (tensors by their CRC-32)."""
    return _encode((header.tree, header.tensors))


def _checked_body(frame: memoryview, limits: Limits) -> memoryview:
    if not _PREFIX.size + _CRC.size < frame.nbytes <= limits.header_bytes:
        raise BadMessage(f"the header has {frame.nbytes} bytes, the limit is {limits.header_bytes}")
    magic, version = _PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise BadMessage(f"the header begins with {magic!r}, not with {MAGIC!r}: no message of this system")
    if zlib.crc32(frame[: -_CRC.size]) != _CRC.unpack_from(frame, frame.nbytes - _CRC.size)[0]:
        raise BadMessage("the header is damaged: its CRC-32 does not match")
    if version != WIRE_VERSION:
        raise BadMessage(
            f"the message has wire version {version}, this worker speaks {WIRE_VERSION}; "
            "install the same stageline on every machine"
        )
    return frame[_PREFIX.size : -_CRC.size]


def _check_numbers(header: Header, limits: Limits) -> None:
    announced = len(header.tensors)
    if announced > limits.tensors:
        raise BadMessage(f"{header.identity} announces {announced} tensors, the limit is {limits.tensors}")
    in_tree = 1 if header.tree == ONE_TENSOR else count_tensors(header.tree, limits.depth)
    if in_tree != announced:
        raise BadMessage(f"{header.identity} has {in_tree} tensors in its tree and announces {announced}")
    nbytes = sum(tensor.nbytes for tensor in header.tensors)
    if nbytes > limits.message_bytes:
        raise BadMessage(f"{header.identity} announces {nbytes} bytes, the limit is {limits.message_bytes}")


def _check_tensor(tensor: TensorHeader, limits: Limits) -> str | None:
    if len(tensor.shape) > limits.ndim:
        return f"{len(tensor.shape)} dimensions, the limit is {limits.ndim}"
    return _complaint(tensor.dtype, tensor.shape, tensor.strides, tensor.requires_grad, tensor.nbytes)


@lru_cache(maxsize=1024)  # the same few layouts pass all day
def _complaint(code: int, shape: Ints, strides: Ints, requires_grad: bool, nbytes: int) -> str | None:
    dtype = DTYPES.get(code)
    if dtype is None:
        return f"unknown dtype code {code}"
    if len(strides) != len(shape):
        return f"strides {strides} do not fit shape {shape}"
    if prod(size or 1 for size in shape) * dtype.itemsize > MOST:
        return f"shape {shape} has more elements than can be counted"
    elements = block_size(shape, strides)
    if elements is None:
        return f"shape {shape} with strides {strides} is not dense"
    if elements * dtype.itemsize != nbytes:
        return f"{nbytes} bytes announced, shape and dtype need {elements * dtype.itemsize}"
    if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        return f"requires_grad with {dtype}, which has no gradients"
    return None
