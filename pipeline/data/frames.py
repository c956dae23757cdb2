"""A batch as bytes, between a reader process and the process that it was forked from. Nothing is unpickled.

size of the header (8 bytes) | header: the batch, a form in each tensor's place | memory of tensor 0 | of tensor 1 | ...
"""

import ctypes
import socket
from typing import TypeAlias

import msgspec
import torch

from stageline.pipeline.tree import Tree, tensors

_SIZE = 8  # bytes that say how long a header is
_TENSOR = 1  # the code of a tensor's form

Frames: TypeAlias = list[bytes | memoryview]

_forms = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], tuple[int, ...]])


class Ended(Exception):
    """The process at the other end is gone."""


def encode(content: Tree) -> Frames:
    """Return the bytes of a tree of dense tensors on the CPU, whose memory is not copied."""
    header = msgspec.msgpack.encode(content, enc_hook=_form_of)
    return [len(header).to_bytes(_SIZE, "little") + header, *map(_memory, tensors(content))]


def send(connection: socket.socket, frames: Frames) -> None:
    """Send `frames`. Raises `OSError` if the other end is gone."""
    for frame in frames:
        connection.sendall(frame)


def receive(connection: socket.socket) -> Tree:
    """Return the tree that was sent; sequences are tuples. Raises `Ended`, or `OSError`, if the other end is gone."""
    header = _read(connection, int.from_bytes(_read(connection, _SIZE), "little"))
    content = _with_tuples(msgspec.msgpack.decode(header, ext_hook=_empty))
    for tensor in tensors(content):
        _read_into(connection, _memory(tensor))
    return content


def _form_of(tensor: torch.Tensor) -> msgspec.msgpack.Ext:
    form = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride()
    return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(form))


def _empty(code: int, form: memoryview) -> torch.Tensor:
    dtype, shape, strides = _forms.decode(form)
    return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype))


def _with_tuples(content: object) -> Tree:
    if isinstance(content, list):
        return tuple(_with_tuples(part) for part in content)
    if isinstance(content, dict):
        return {name: _with_tuples(part) for name, part in content.items()}
    return content  # type: ignore[return-value]  # a leaf


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense tensor, in the order in which they lie."""
    size = tensor.numel() * tensor.itemsize
    if not size:
        return memoryview(b"")
    held = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    held.tensor = tensor  # type: ignore[attr-defined]  # keeps the memory alive
    return memoryview(held).cast("B")


def _read(connection: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    _read_into(connection, memoryview(content))
    return bytes(content)


def _read_into(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        if not (count := connection.recv_into(memory)):
            raise Ended
        memory = memory[count:]
