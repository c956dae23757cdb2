"""A tensor as a header and a frame of bytes, and back.

The frame holds each stored element once, in the order of their addresses, little-endian.
"""

import torch
from torch import Tensor

from stageline.broker.errors import Unsendable
from stageline.pipeline.stage.layout import Ints, layout, packed_strides, stored_shape
from stageline.pipeline.stage.placing import empty, skew_of

from .checksum import crc32
from .dtypes import CODES, DTYPES
from .header import Frame, TensorHeader

_KINDS = frozenset({Tensor, torch.nn.Parameter})
_NATIVE = frozenset(  # whose memory Python can see as bytes
    {torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64}
    | {torch.int64, torch.float16, torch.float32, torch.float64}
)


def pack(tensor: Tensor) -> tuple[TensorHeader, memoryview]:
    """The tensor's header and frame. The frame of a dense CPU tensor lies over its memory and keeps that alive.

    Raises `Unsendable` for a tensor that does not consist of numbers in strided memory, or of an unknown dtype.
    """
    if not (type(tensor) in _KINDS and tensor.layout is torch.strided and tensor.dtype in CODES):
        raise Unsendable(_complaint(tensor))
    if tensor.is_nested or tensor.is_meta:
        raise Unsendable(_complaint(tensor))
    plain = tensor.detach() if tensor.requires_grad else tensor
    shape, strides = tuple(tensor.shape), tensor.stride()
    if plain.is_contiguous() and plain.is_cpu and plain.dtype in _NATIVE and plain.numel() and not plain.is_neg():
        memory = plain.numpy().data.cast("B")
    else:
        strides, memory = _stored(plain, shape, strides)
    code, checksum, skew = CODES[tensor.dtype], crc32(memory), skew_of(tensor)
    return TensorHeader(code, shape, strides, tensor.requires_grad, len(memory), checksum, skew), memory


def copy(header: TensorHeader, frame: Frame) -> Tensor:
    """The tensor of a checked header, in memory of its own, filled from `frame`."""
    dtype = DTYPES[header.dtype]
    if dtype in _NATIVE and header.nbytes and not header.skew:
        tensor = torch.empty_strided(header.shape, header.strides, dtype=dtype)
        if tensor.is_contiguous():
            tensor.numpy().data.cast("B")[:] = frame
            return tensor.requires_grad_() if header.requires_grad else tensor
    filled = buffer(header)
    filled[:] = frame
    return unpack(header, filled)


def buffer(header: TensorHeader) -> memoryview:
    """Memory for the frame of `header`, as far off an alignment boundary as it lay."""
    memory = torch.empty(header.skew + header.nbytes, dtype=torch.uint8)
    return memory.numpy().data[header.skew :]


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


def _complaint(tensor: Tensor) -> str:
    if type(tensor) not in _KINDS:
        return f"a {type(tensor).__qualname__} cannot travel; send a tensor: .as_subclass(torch.Tensor)"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"a nested or {tensor.layout} tensor cannot travel; send .to_dense() or its parts"
    if tensor.is_meta:
        return "a meta tensor cannot travel: it has no values"
    return f"a {tensor.dtype} tensor cannot travel; convert it, for example with .dequantize()"


def _stored(plain: Tensor, shape: Ints, strides: Ints) -> tuple[Ints, memoryview]:
    """The strides to travel with, and the stored elements in one piece."""
    form = layout(shape, strides)
    if form.extent is None:
        strides = packed_strides(shape, strides)
    if not form.dense or not plain.is_cpu or plain.is_conj() or plain.is_neg():
        plain = _packed(plain)
    return strides, plain.as_strided((form.stored,), (1,)).view(torch.uint8).numpy().data


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
