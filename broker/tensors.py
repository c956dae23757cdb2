"""A tensor as a header and a frame of bytes, and back.

The frame holds each stored element once, in the order of their addresses, little-endian.
"""

import zlib

import torch
from torch import Tensor

from pipeline.layout import layout, packed_strides, stored_shape
from pipeline.placing import empty, skew_of

from .dtypes import CODES, DTYPES
from .errors import Unsendable
from .header import TensorHeader


def pack(tensor: Tensor) -> tuple[TensorHeader, memoryview]:
    """The tensor's header and frame. The frame of a dense CPU tensor lies over its memory and keeps that alive.

    Raises `Unsendable` for a tensor that does not consist of numbers in strided memory, or of an unknown dtype.
    """
    _check_sendable(tensor)
    plain = tensor.detach() if tensor.requires_grad else tensor
    shape, strides = tuple(plain.shape), plain.stride()
    form = layout(shape, strides)
    if form.extent is None:
        strides = packed_strides(shape, strides)
    if not form.dense or not plain.is_cpu or plain.is_conj() or plain.is_neg():
        plain = _packed(plain)
    skew = skew_of(tensor)
    memory = plain.as_strided((form.stored,), (1,)).view(torch.uint8).numpy().data
    code, checksum = CODES[plain.dtype], zlib.crc32(memory)
    return TensorHeader(code, shape, strides, tensor.requires_grad, memory.nbytes, checksum, skew), memory


def unpack(header: TensorHeader, buffer: memoryview) -> Tensor:
    """The tensor of a checked header. `buffer` becomes its memory, or is spread out where the layout has gaps."""
    shape, strides, dtype = header.shape, header.strides, DTYPES[header.dtype]
    form = layout(shape, strides)
    if form.stored == 0:  # frombuffer refuses nothing
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
    elif form.dense:
        tensor = torch.frombuffer(buffer, dtype=dtype).as_strided_(shape, strides)
    else:
        tensor = _spread(torch.frombuffer(buffer, dtype=dtype), header)
    return tensor.requires_grad_() if header.requires_grad else tensor


def _check_sendable(tensor: Tensor) -> None:
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        raise Unsendable(f"a {type(tensor).__qualname__} cannot travel; send a tensor: .as_subclass(torch.Tensor)")
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise Unsendable(f"a nested or {tensor.layout} tensor cannot travel; send .to_dense() or its parts")
    if tensor.is_meta:
        raise Unsendable("a meta tensor cannot travel: it has no values")
    if tensor.dtype not in CODES:
        raise Unsendable(f"a {tensor.dtype} tensor cannot travel; convert it, for example with .dequantize()")


def _packed(tensor: Tensor) -> Tensor:
    """A dense copy on the CPU, its elements in the same order, with nothing left to be conjugated or negated."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    stored, packed = stored_shape(shape, strides), packed_strides(shape, strides)
    memory = torch.empty_strided(stored, packed, dtype=tensor.dtype)
    return memory.copy_(tensor.as_strided(stored, strides)).as_strided_(shape, packed)


def _spread(elements: Tensor, header: TensorHeader) -> Tensor:
    shape, strides = header.shape, header.strides
    stored, packed = stored_shape(shape, strides), packed_strides(shape, strides)
    memory = empty(stored, strides, elements.dtype, header.skew)
    return memory.copy_(elements.as_strided(stored, packed)).as_strided_(shape, strides)
