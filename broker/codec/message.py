"""A message is what travels on a queue; it is encoded to frames, and decoded from them.

encode                             message -> [header, tensor, tensor, ...]    frames are views of the tensors
decode                             frames  -> message                          copies once
read_header, allocate, assemble    the steps of decode, for a transport that can receive into the tensors' memory
"""

from collections.abc import Sequence

import torch

from stageline.broker.errors import BadMessage
from stageline.pipeline.tree import Tree

from .checksum import crc32
from .header import (
    LIMITS,
    Flow,
    Header,
    Identity,
    Limits,
    MessageInfo,
    check_run,
    fingerprint,
    read_header,
    write_header,
)
from .structure import ONE_TENSOR, flatten, unflatten
from .tensors import Frame, buffer, copy, pack, unpack

__all__ = [
    "LIMITS",
    "Flow",
    "Frame",
    "Header",
    "Identity",
    "Limits",
    "Message",
    "allocate",
    "assemble",
    "check_run",
    "complete",
    "decode",
    "encode",
    "fingerprint",
    "read_header",
]


class Message(MessageInfo, frozen=True):
    """What travels on a queue. `payload` is a tensor, a plain value, or tuples, lists and dicts of them, nested."""

    payload: Tree


def encode(message: Message, *, limits: Limits = LIMITS) -> list[Frame]:
    """The message's frames: the header, then the bytes of each tensor, flat.

    A dense tensor on the CPU is not copied: its frame is a view of its memory and keeps that alive, so the tensor must
    not be written to while the frame is in use. Raises `Unsendable` for what cannot travel, and for what a receiver
    with these limits would refuse.
    """
    if isinstance(message.payload, torch.Tensor):
        structure, parts = ONE_TENSOR, [pack(message.payload)]
    else:
        structure, tensors = flatten(message.payload, limits.depth)
        parts = [pack(tensor) for tensor in tensors]
    header = Header(
        message.run,
        message.flow,
        message.step,
        message.microbatch,
        message.stage,
        message.incarnation,
        message.sequence,
        structure,
        tuple([part[0] for part in parts]),
    )
    return [write_header(header, limits=limits), *[part[1] for part in parts]]


def decode(frames: Sequence[Frame], *, limits: Limits = LIMITS) -> Message:
    """The message of `frames`. Its tensors have memory of their own, with the strides and the skew of the sender's.

    Raises `BadMessage` naming what is wrong; nothing is allocated before all sizes are checked.
    """
    if not frames:
        raise BadMessage("a message without frames")
    return complete(read_header(frames[0], limits=limits), frames[1:])


def complete(header: Header, contents: Sequence[Frame]) -> Message:
    """The message of a header and the frames that followed it, copied into memory of its own.

    Raises `BadMessage` if a frame does not have the size or the checksum in the header.
    """
    _check(header, contents)
    return _message(header, [copy(tensor, content) for tensor, content in zip(header.tensors, contents, strict=True)])


def allocate(header: Header) -> list[memoryview]:
    """A writable buffer for each tensor of the header, in order, to receive its frame into."""
    return [buffer(tensor) for tensor in header.tensors]


def assemble(header: Header, buffers: Sequence[memoryview]) -> Message:
    """The message of a header and its filled buffers, which become the memory of its tensors.

    Raises `BadMessage` if a buffer does not have the size or the checksum in the header.
    """
    _check(header, buffers)
    return _message(header, [unpack(tensor, buffer) for tensor, buffer in zip(header.tensors, buffers, strict=True)])


def _message(header: Header, tensors: list[torch.Tensor]) -> Message:
    return Message(
        header.run,
        header.flow,
        header.step,
        header.microbatch,
        header.stage,
        header.incarnation,
        header.sequence,
        tensors[0] if header.structure == ONE_TENSOR else unflatten(header.structure, iter(tensors)),
    )


def _check(header: Header, contents: Sequence[Frame]) -> None:
    if len(contents) != len(header.tensors):
        raise BadMessage(f"{header.identity} came with {len(contents)} tensor frames, not {len(header.tensors)}")
    for number, content in enumerate(contents):
        announced = header.tensors[number]
        if (size := len(content)) != announced.nbytes:
            raise BadMessage(f"tensor {number} of {header.identity} came with {size} bytes, not {announced.nbytes}")
        if crc32(content) != announced.crc32:
            raise BadMessage(f"tensor {number} of {header.identity} is damaged: its CRC-32 does not match")
