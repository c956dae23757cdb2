"""A message is what travels on a queue; here it becomes frames, and frames become a message again.

encode                  message -> [header, tensor, tensor, ...]     frames lie over the tensors' own memory
decode                  frames  -> message                           copies once, into memory of its own
read_header, allocate, assemble                                      the steps of decode, for a transport that can
                                                                     receive into the tensors' memory
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from .errors import BadMessage, Unsendable
from .header import (
    DTYPES,
    LIMITS,
    Flow,
    Header,
    Identity,
    Limits,
    TensorHeader,
    check_run,
    fingerprint,
    read_header,
    write_header,
)
from .layout import block_size, packed_strides, stored_shape
from .tree import ONE_TENSOR, Node, Tree, put_together, take_apart

__all__ = [
    "LIMITS",
    "Flow",
    "Frame",
    "Header",
    "Identity",
    "Limits",
    "Message",
    "Tree",
    "allocate",
    "assemble",
    "check_run",
    "decode",
    "encode",
    "fingerprint",
    "read_header",
]

Frame: TypeAlias = bytes | memoryview  # or anything else with a buffer of bytes, such as zmq.Frame

_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Message:
    """What travels on a queue. `stage` is the consumer's, `incarnation` the producer's.

    `sequence` numbers the messages of a queue from 0. `payload` is a tensor, a plain value, or tuples, lists and
    dicts of them; it is compared by identity only, as tensors are.
    """

    run: str
    flow: Flow
    step: int
    microbatch: int
    stage: int
    incarnation: int
    sequence: int
    payload: Tree

    @property
    def identity(self) -> Identity:
        return Identity(self.run, self.flow, self.step, self.microbatch, self.stage)


def encode(message: Message, *, limits: Limits = LIMITS) -> list[Frame]:
    """The message's frames: header, then one flat buffer of bytes per tensor.

    A dense tensor on the CPU is not copied: its frame lies over its memory and keeps it alive, so the tensor must not
    be written to while the frame is in use. Other tensors are copied once. Raises `Unsendable` for what cannot travel,
    and for what a receiver with these `limits` would refuse.
    """
    node: Node
    if isinstance(message.payload, Tensor):
        node, tensors = ONE_TENSOR, [message.payload]
    else:
        node, tensors = take_apart(message.payload, limits.depth)
    parts = [_tensor_frame(tensor) for tensor in tensors]
    header = Header(
        message.run,
        message.flow,
        message.step,
        message.microbatch,
        message.stage,
        message.incarnation,
        message.sequence,
        node,
        tuple([part[0] for part in parts]),
    )
    return [write_header(header), *[part[1] for part in parts]]


def decode(frames: Sequence[Frame], *, limits: Limits = LIMITS) -> Message:
    """The message of `frames`. Its tensors own their memory, which is aligned to 64 bytes; nothing of `frames` is kept.

    Raises `BadMessage` naming what is wrong; nothing is allocated before all sizes are checked.
    """
    if not frames:
        raise BadMessage("a message without frames")
    header = read_header(frames[0], limits=limits)
    contents = [memoryview(frame) for frame in frames[1:]]
    _check_sizes(header, contents)
    buffers = allocate(header)
    for buffer, content in zip(buffers, contents, strict=True):
        buffer[:] = content
    return assemble(header, buffers)


def allocate(header: Header) -> list[memoryview]:
    """A writable buffer for each tensor of a header, in order, to receive its frame into."""
    return [torch.empty(tensor.nbytes, dtype=torch.uint8).numpy().data for tensor in header.tensors]


def assemble(header: Header, buffers: Sequence[memoryview]) -> Message:
    """The message of a header and its filled buffers, which become the memory of its tensors.

    Raises `BadMessage` if a buffer's size or checksum is not what the header says.
    """
    _check_sizes(header, buffers)
    for number, (tensor, buffer) in enumerate(zip(header.tensors, buffers, strict=True)):
        if zlib.crc32(buffer) != tensor.crc32:
            raise BadMessage(f"tensor {number} of {header.identity} is damaged: its CRC-32 does not match")
    tensors = [_tensor(tensor, buffer) for tensor, buffer in zip(header.tensors, buffers, strict=True)]
    return Message(
        header.run,
        header.flow,
        header.step,
        header.microbatch,
        header.stage,
        header.incarnation,
        header.sequence,
        tensors[0] if header.tree == ONE_TENSOR else put_together(header.tree, iter(tensors)),
    )


def _check_sizes(header: Header, contents: Sequence[memoryview]) -> None:
    if len(contents) != len(header.tensors):
        raise BadMessage(f"{header.identity} came with {len(contents)} tensor frames, not {len(header.tensors)}")
    for number, (tensor, content) in enumerate(zip(header.tensors, contents, strict=True)):
        if content.nbytes != tensor.nbytes:
            raise BadMessage(
                f"tensor {number} of {header.identity} came with {content.nbytes} bytes, not {tensor.nbytes}"
            )


def _tensor_frame(tensor: Tensor) -> tuple[TensorHeader, memoryview]:
    _check_sendable(tensor)
    plain, elements = _plain(tensor)
    memory = plain.as_strided((elements,), (1,)).view(torch.uint8).numpy().data
    shape, strides = tuple(plain.shape), plain.stride()
    code, checksum = _CODES[plain.dtype], zlib.crc32(memory)
    return TensorHeader(code, shape, strides, tensor.requires_grad, memory.nbytes, checksum), memory


def _check_sendable(tensor: Tensor) -> None:
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        raise Unsendable(f"a {type(tensor).__qualname__} cannot travel; send a tensor: .as_subclass(torch.Tensor)")
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise Unsendable(f"a nested or {tensor.layout} tensor cannot travel; send .to_dense() or its parts")
    if tensor.is_meta:
        raise Unsendable("a meta tensor has no values to send")
    if tensor.dtype not in _CODES:
        raise Unsendable(f"a {tensor.dtype} tensor cannot travel; convert it, for example with .dequantize()")


def _plain(tensor: Tensor) -> tuple[Tensor, int]:
    """The same values outside autograd, on the CPU and dense, in the tensor's own memory if they are; and the number
    of elements stored there."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    elements = block_size(tuple(tensor.shape), tensor.stride())
    if elements is not None and tensor.is_cpu:
        return tensor, elements
    return _gathered(tensor, dense=elements is not None)


def _gathered(tensor: Tensor, *, dense: bool) -> tuple[Tensor, int]:
    shape, strides = tuple(tensor.shape), tensor.stride()
    stored = stored_shape(shape, strides)
    new_strides = strides if dense else packed_strides(shape, strides)
    memory = torch.empty_strided(stored, new_strides, dtype=tensor.dtype)
    memory.copy_(tensor.as_strided(stored, strides))
    return memory.as_strided(shape, new_strides), memory.numel()


def _tensor(header: TensorHeader, buffer: memoryview) -> Tensor:
    dtype = DTYPES[header.dtype]
    if header.nbytes:
        tensor = torch.frombuffer(buffer, dtype=dtype).as_strided_(header.shape, header.strides)
    else:  # which frombuffer refuses
        tensor = torch.empty_strided(header.shape, header.strides, dtype=dtype)
    return tensor.requires_grad_() if header.requires_grad else tensor
