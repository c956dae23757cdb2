"""Message that travels on a queue; it is encoded to frames, and decoded from them.

encode                             message -> [header, tensor, tensor, ...]    frames are views of the tensors
decode                             frames  -> message                          copies once
read_header, allocate, assemble    the steps of decode, for a transport that can receive into the tensors' memory

The header says which message it is and what the other frames hold. docs/reference/messages.md is its specification:

    magic "SLMG" | wire version, u16 | Header, msgpack array | CRC-32 of all before, u32        (little-endian)

A tensor's frame holds each stored element once, in the order of their addresses, little-endian, or what a codec makes
of them.
"""

import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import torch
from zlib_ng.zlib_ng import crc32

from stageline.broker.errors import BadMessage, ForeignMessage, Unsendable
from stageline.pipeline.program import QueueName
from stageline.pipeline.stage.layers.memory import ALIGNMENT, Ints, empty, layout, packed_strides, skew_of, stored_shape
from stageline.pipeline.tree import Tree

from .structure import ONE_TENSOR, Structure, count_tensors, flatten, former_fingerprint, unflatten
from .tensors import (
    CODES,
    DTYPES,
    TENSOR_TYPES,
    CodedTensorHeader,
    Count,
    PackedTensor,
    TensorHeader,
    can_travel,
    decoded,
    occupied_bytes,
    why_not,
)

Frame: TypeAlias = bytes | memoryview  # a memoryview is one of bytes

WIRE_VERSION = 2
MAGIC = b"SLMG"

_NUMPY_DTYPES = frozenset(  # those whose tensors `Tensor.numpy` accepts
    {torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64}
    | {torch.int64, torch.float16, torch.float32, torch.float64}
)
_START = struct.Struct("<4sH")
_CRC = struct.Struct("<I")
_PROLOGUE = _START.pack(MAGIC, WIRE_VERSION)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a message that a receiver accepts; a sender applies them to itself."""

    message_bytes: int = 2**32  # that the tensors of a message occupy, gaps between their elements included
    header_bytes: int = 2**20
    tensors: int = 4096
    ndim: int = 32
    depth: int = 16  # containers within containers


LIMITS = Limits()


class MessageInfo(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Identity of a message: `number` counts the messages of `queue` from 0; `incarnation` is the producer's."""

    run: str
    queue: QueueName
    number: Count
    incarnation: Count

    @property
    def identity(self) -> str:
        """Number and queue in words. Messages of one identity must have the same bits, whichever worker made them."""
        return f"message {self.number} of {self.queue}"


class Header(MessageInfo, frozen=True):
    """Message without the bytes of its tensors."""

    structure: Structure
    tensors: tuple[TensorHeader, ...]


class _ReceivedHeader(Header, frozen=True):
    tensors: tuple[CodedTensorHeader, ...]


class Message(MessageInfo, frozen=True):
    """Message as it travels on a queue.

    `payload` is a tensor, a plain value, or tuples, lists and dicts of them, nested.
    """

    payload: Tree


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_ReceivedHeader).decode


def encode(message: Message, *, limits: Limits = LIMITS) -> list[Frame]:
    """Return the message's frames: the header, then the bytes of each tensor, flat.

    A dense tensor on the CPU is not copied: its frame is a view of its memory and keeps that alive, so the tensor must
    not be written to while the frame is in use. A tensor that `coded` has packed is sent as it is.

    Raises `Unsendable` for what cannot travel, and for what a receiver with these limits would refuse.
    """
    payload = message.payload
    if isinstance(payload, torch.Tensor):
        entry, memory = pack(payload)
        return [_write_header(_header(message, ONE_TENSOR, (entry,)), limits), memory]
    structure, tensors = flatten(payload, limits.depth)
    parts = [pack(tensor) for tensor in tensors]
    header = _header(message, structure, tuple([part[0] for part in parts]))
    return [_write_header(header, limits), *[part[1] for part in parts]]


def _header(message: Message, structure: Structure, tensors: tuple[TensorHeader, ...]) -> Header:
    return Header(message.run, message.queue, message.number, message.incarnation, structure, tensors)


def decode(frames: Sequence[Frame], *, limits: Limits = LIMITS) -> Message:
    """Return the message of `frames`.

    Its tensors have memory of their own, with the strides and the skew of the sender's. Raises `BadMessage` naming what
    is wrong; nothing is allocated before all sizes are checked.
    """
    if not frames:
        raise BadMessage("a message without frames")
    return complete(read_header(frames[0], limits=limits), frames[1:])


def complete(header: Header, contents: Sequence[Frame]) -> Message:
    """Return the message of a header and the frames that followed it, copied into memory of its own.

    Each tensor has one frame, or several that hold its bytes in order.

    Raises `BadMessage` if the bytes of a tensor do not have the size or the checksum in the header.
    """
    if len(contents) > len(header.tensors):
        return assemble(header, _joined(header, contents))
    _check(header, contents)
    return _message(header, list(map(copy, header.tensors, contents)))


def _joined(header: Header, pieces: Sequence[Frame]) -> list[memoryview]:
    """Return a buffer for each tensor, filled with its pieces. Raises `BadMessage` for more or fewer bytes."""
    complaint = f"{header.identity} came with {len(pieces)} tensor frames, not {len(header.tensors)}, and"
    size, announced = sum(map(len, pieces)), sum(tensor.nbytes for tensor in header.tensors)
    if size != announced:
        raise BadMessage(f"{complaint} {size} bytes, not {announced}")
    buffers, rest = allocate(header), iter(pieces)
    for number, room in enumerate(buffers):
        filled = 0
        for piece in rest:
            if (end := filled + len(piece)) > len(room):
                raise BadMessage(f"{complaint} the frames of tensor {number} have more bytes than {len(room)}")
            room[filled:end] = piece
            if (filled := end) == len(room):
                break
    if next(rest, None) is not None:
        raise BadMessage(f"{complaint} those after the last tensor have no bytes")
    return buffers


def allocate(header: Header) -> list[memoryview]:
    """Return a writable buffer for each tensor of the header, in order, to receive its frame into."""
    return [buffer(tensor) for tensor in header.tensors]


def assemble(header: Header, buffers: Sequence[memoryview]) -> Message:
    """Return the message of a header and its filled buffers, which become the memory of its tensors.

    Raises `BadMessage` if a buffer does not have the size or the checksum in the header.
    """
    _check(header, buffers)
    return _message(header, [unpack(tensor, buffer) for tensor, buffer in zip(header.tensors, buffers, strict=True)])


def read_header(frame: Frame, *, limits: Limits = LIMITS) -> Header:
    """Return the header of a first frame, with everything checked that can be checked without the other frames.

    The memory that the header asks for may be allocated. Raises `BadMessage` naming what is wrong.
    """
    try:
        header = _decode(_body(memoryview(frame), limits))
    except (ValueError, RecursionError) as error:  # ValueError: msgspec's own errors, and invalid UTF-8
        raise BadMessage(f"the header is malformed: {error}") from error
    one = header.structure == ONE_TENSOR and type(header.structure[0]) is int  # `False` and `0.0` equal 0
    count = 1 if one else count_tensors(header.structure, limits.depth)
    if count != len(header.tensors):
        raise BadMessage(f"{header.identity} has {count} tensors in its structure and announces {len(header.tensors)}")
    complaint = _complaint(header, limits)
    if complaint:
        raise BadMessage(f"{header.identity} {complaint}")
    return header


def check_run(header: Header, run: str) -> None:
    """Raise `ForeignMessage` naming both runs if the message is not of `run`."""
    if header.run != run:
        raise ForeignMessage(
            f"{header.identity} belongs to run {header.run!r}, this worker to run {run!r}; "
            "two runs share a queue address: give one of them another queues.url"
        )


def fingerprint(header: Header) -> Hashable:
    """Return a value that is equal for two messages of one identity if they have the same bits.

    Bits of tensors are compared as far as their CRC-32 can tell. For a message whose content is gone the value stands
    for that content: `agree` compares them. The skews are left out: where a user's own arrays lie in memory may differ
    between two runs of the same code.
    """
    if len(header.tensors) == 1 and header.structure == ONE_TENSOR:
        (t,) = header.tensors
        return t.crc32, t.dtype, t.shape, t.strides, t.requires_grad
    if not header.tensors and (former := former_fingerprint(header.structure)) is not None:
        return former
    return (
        _encode((header.structure, [(t.dtype, t.shape, t.strides, t.requires_grad, t.crc32) for t in header.tensors])),
    )


def _write_header(header: Header, limits: Limits) -> bytes:
    """Return the first frame. Raises `Unsendable` for what a receiver with these limits would refuse."""
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


def _body(frame: memoryview, limits: Limits) -> memoryview:
    if not _START.size + _CRC.size < frame.nbytes <= limits.header_bytes:
        raise BadMessage(f"a header of {frame.nbytes} bytes, the limit is {limits.header_bytes}")
    magic, version = _START.unpack_from(frame)
    if magic != MAGIC:
        raise BadMessage(f"the header begins with {magic!r}, not with {MAGIC!r}: not a message of stageline")
    if crc32(frame[: -_CRC.size]) != _CRC.unpack_from(frame, frame.nbytes - _CRC.size)[0]:
        raise BadMessage("the header is damaged: its CRC-32 does not match")
    if version != WIRE_VERSION:
        raise ForeignMessage(
            f"the message has wire version {version}, this side has {WIRE_VERSION}; "
            "install the same version of stageline on every machine"
        )
    return frame[_START.size : -_CRC.size]


def _complaint(header: Header, limits: Limits) -> str | None:
    if len(header.tensors) > limits.tensors:
        return f"has {len(header.tensors)} tensors, the limit is {limits.tensors}"
    total = 0
    for number, t in enumerate(header.tensors):
        occupied = occupied_bytes(t.dtype, t.shape, t.strides, t.nbytes, t.requires_grad, t.skew, t.codec, limits.ndim)
        if type(occupied) is not int:
            return f"is wrong about tensor {number}: {occupied}"
        total += occupied
    if total > limits.message_bytes:
        return f"needs {total} bytes for its tensors and the gaps in them, the limit is {limits.message_bytes}"
    return None


def _message(header: Header, tensors: list[torch.Tensor]) -> Message:
    payload = tensors[0] if header.structure == ONE_TENSOR else unflatten(header.structure, iter(tensors))
    return Message(header.run, header.queue, header.number, header.incarnation, payload)


def _check(header: Header, contents: Sequence[Frame]) -> None:
    if len(contents) != len(header.tensors):
        raise BadMessage(f"{header.identity} came with {len(contents)} tensor frames, not {len(header.tensors)}")
    for number, content in enumerate(contents):
        announced = header.tensors[number]
        if (size := len(content)) != announced.nbytes:
            raise BadMessage(f"tensor {number} of {header.identity} came with {size} bytes, not {announced.nbytes}")
        if crc32(content) != announced.crc32:
            raise BadMessage(f"tensor {number} of {header.identity} is damaged: its CRC-32 does not match")


def pack(tensor: torch.Tensor | PackedTensor) -> tuple[TensorHeader, memoryview]:
    """Return the header and the frame of `tensor`, of any shape and any dtype in `DTYPES`.

    The frame of a dense CPU tensor is a view of its memory and keeps that alive. Raises `Unsendable` for a tensor that
    does not consist of numbers in strided memory, or of an unknown dtype.
    """
    if isinstance(tensor, PackedTensor):
        return tensor.header, tensor.memory
    if type(tensor) not in TENSOR_TYPES or (dtype := tensor.dtype) not in _NUMPY_DTYPES:
        return _pack_any(tensor)
    grad = tensor.requires_grad
    try:  # to ask for each reason why not takes longer
        array = (tensor.detach() if grad else tensor).numpy()
        memory = array.data.cast("B")
    except (TypeError, RuntimeError):  # not on the CPU, not strided, negated; gaps between the elements, or no elements
        return _pack_any(tensor)
    skew = tensor.data_ptr() % ALIGNMENT
    if skew % dtype.itemsize:
        skew = 0
    strides = tensor.stride()
    return TensorHeader(CODES[dtype], array.shape, strides, grad, len(memory), crc32(memory), skew), memory


def copy(header: TensorHeader, frame: bytes | memoryview) -> torch.Tensor:
    """Return the tensor of a checked header, in memory of its own, filled from `frame`.

    Raises `BadMessage` as `unpack` does.
    """
    dtype = DTYPES[header.dtype]
    if not header.codec and dtype in _NUMPY_DTYPES and header.nbytes and not header.skew:
        tensor = torch.empty_strided(header.shape, header.strides, dtype=dtype)
        if tensor.is_contiguous():
            tensor.numpy().data.cast("B")[:] = frame
            return tensor.requires_grad_() if header.requires_grad else tensor
    filled = buffer(header)
    filled[:] = frame
    return unpack(header, filled)


def buffer(header: TensorHeader) -> memoryview:
    """Return memory for the frame of `header`.

    The memory begins `header.skew` bytes off an alignment boundary if it becomes the tensor's own.
    """
    skew = 0 if header.codec else header.skew
    memory = torch.empty(skew + header.nbytes, dtype=torch.uint8)
    return memory.numpy().data[skew:]


def unpack(header: TensorHeader, buffer: memoryview) -> torch.Tensor:
    """Return the tensor of a checked header, with the content of `buffer`.

    The buffer becomes the tensor's memory, or is spread out where the layout has gaps, or decoded. Raises `BadMessage`
    for what no codec writes.
    """
    shape, strides, dtype = header.shape, header.strides, DTYPES[header.dtype]
    form = layout(shape, strides)
    if header.codec:
        return decoded(header, buffer)
    if form.stored == 0:  # frombuffer refuses an empty buffer
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
    elif form.dense:
        tensor = torch.frombuffer(buffer, dtype=dtype).as_strided_(shape, strides)
    else:
        tensor = _spread(torch.frombuffer(buffer, dtype=dtype), header)
    return tensor.requires_grad_() if header.requires_grad else tensor


def _pack_any(tensor: torch.Tensor) -> tuple[TensorHeader, memoryview]:
    if not can_travel(tensor):
        raise Unsendable(why_not(tensor))
    plain = tensor.detach() if tensor.requires_grad else tensor
    shape = tuple(tensor.shape)
    strides, memory = _stored(plain, shape, tensor.stride())
    code, checksum, skew = CODES[tensor.dtype], crc32(memory), skew_of(tensor)
    return TensorHeader(code, shape, strides, tensor.requires_grad, len(memory), checksum, skew), memory


def _stored(plain: torch.Tensor, shape: Ints, strides: Ints) -> tuple[Ints, memoryview]:
    """Return the strides to send, and the stored elements as one block of bytes."""
    form = layout(shape, strides)
    if form.extent is None:
        strides = packed_strides(shape, strides)
    if not form.dense or not plain.is_cpu or plain.is_conj() or plain.is_neg():
        plain = _packed(plain)
    return strides, plain.as_strided((form.stored,), (1,)).view(torch.uint8).numpy().data


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense copy on the CPU, its elements in the same order, with conjugation and negation resolved."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    stored, packed = stored_shape(shape, strides), packed_strides(shape, strides)
    memory = torch.empty_strided(stored, packed, dtype=tensor.dtype)
    return memory.copy_(tensor.as_strided(stored, strides)).as_strided_(shape, packed)


def _spread(elements: torch.Tensor, header: TensorHeader) -> torch.Tensor:
    shape, strides = header.shape, header.strides
    stored, packed = stored_shape(shape, strides), packed_strides(shape, strides)
    memory = empty(stored, strides, elements.dtype, header.skew)
    return memory.copy_(elements.as_strided(stored, packed)).as_strided_(shape, strides)
