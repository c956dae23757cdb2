"""Conversion of a tensor to an entry of the header and a frame of bytes, and back.

The frame holds each stored element once, in the order of their addresses, little-endian, or what a codec makes of them.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Annotated, ClassVar

import msgspec
import torch
from zlib_ng.zlib_ng import crc32

from stageline.broker.errors import Unsendable
from stageline.pipeline.stage.layers.memory import ALIGNMENT, Ints, empty, layout, packed_strides, skew_of, stored_shape
from stageline.pipeline.tree import Tree, map_tensors

from .codecs import Codec, coded_size, decode_elements, encode_elements

MOST = 2**63 - 1  # the largest count that can travel
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]

# The dtypes that can travel, by their codes on the wire. A code is never reused and never renumbered.
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
CODES = {dtype: code for code, dtype in DTYPES.items()}

_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMPY_DTYPES = frozenset(  # those whose tensors `Tensor.numpy` accepts
    {torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64}
    | {torch.int64, torch.float16, torch.float32, torch.float64}
)


class TensorHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """Entry of a tensor in the header.

    Attributes:
        dtype: Code of the dtype, a key of `DTYPES`.
        shape: Size of each dimension.
        strides: Stride of each dimension, in elements.
        requires_grad: True if the tensor requires gradients.
        nbytes: Bytes of the frame.
        crc32: CRC-32 of the frame.
        skew: Address of the first element modulo 64, in bytes: kernels choose by alignment too.
        codec: Number of the codec that wrote the frame; here always `LOSSLESS`, which is not sent.
    """

    dtype: int
    shape: tuple[Count, ...]
    strides: tuple[Count, ...]
    requires_grad: bool
    nbytes: Count
    crc32: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    skew: Count
    codec: ClassVar[int] = Codec.LOSSLESS


class CodedTensorHeader(TensorHeader, frozen=True):
    """Entry of a tensor whose frame a codec has written; of any tensor, in a header that was received."""

    codec: Count = Codec.LOSSLESS  # type: ignore[misc]  # the others have no such entry


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Tensor as it travels, in its place in a payload that is about to be sent."""

    header: TensorHeader
    memory: memoryview


@lru_cache(maxsize=1024)  # a run sends tensors of a few layouts again and again
def occupied_bytes(
    code: int, shape: Ints, strides: Ints, nbytes: int, requires_grad: bool, skew: int, codec: int, most_dimensions: int
) -> int | str:
    """Return the bytes that a tensor with such an entry occupies at the receiver, or text on what is wrong with it.

    Args:
        code: Code of the dtype.
        shape: Size of each dimension.
        strides: Stride of each dimension, in elements.
        nbytes: Bytes of the frame, as announced.
        requires_grad: True if the tensor requires gradients.
        skew: Address of the first element modulo 64, in bytes.
        codec: Number of the codec.
        most_dimensions: Most dimensions that the receiver accepts.
    """
    if len(shape) > most_dimensions:
        return f"it has {len(shape)} dimensions, the limit is {most_dimensions}"
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
    needed = coded_size(codec, dtype, stored_shape(shape, strides)) if codec else form.stored * dtype.itemsize
    if needed is None:
        return f"codec {codec} is unknown, or not for {dtype} of shape {shape}"
    if needed != nbytes:
        return f"{nbytes} bytes are announced, shape and dtype need {needed}{f' with codec {codec}' if codec else ''}"
    if skew >= ALIGNMENT or skew % dtype.itemsize:
        return f"a skew of {skew} bytes cannot be: it is below {ALIGNMENT} and a multiple of {dtype.itemsize}"
    if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        return f"{dtype} cannot require gradients"
    return form.extent * dtype.itemsize + skew


def coded(tree: Tree, codec: Codec) -> Tree:
    """Return the payload to send of `tree`, with its tensors as `codec` writes them.

    A tensor stays as it is where the codec does not make it fewer bytes, or cannot hold its values.
    """
    return map_tensors(lambda tensor: _coded(tensor, codec), tree)  # type: ignore[arg-type, return-value]


def delivered(tree: Tree, codec: Codec) -> Tree:
    """Return what the consumer of `coded(tree, codec)` is given."""

    def through(tensor: torch.Tensor) -> torch.Tensor:
        packed = _coded(tensor, codec)
        return copy(packed.header, packed.memory) if isinstance(packed, PackedTensor) else packed

    return map_tensors(through, tree)


def pack(tensor: torch.Tensor | PackedTensor) -> tuple[TensorHeader, memoryview]:
    """Return the header and the frame of `tensor`, of any shape and any dtype in `DTYPES`.

    The frame of a dense CPU tensor is a view of its memory and keeps that alive. Raises `Unsendable` for a tensor that
    does not consist of numbers in strided memory, or of an unknown dtype.
    """
    if isinstance(tensor, PackedTensor):
        return tensor.header, tensor.memory
    if type(tensor) not in _TENSOR_TYPES or (dtype := tensor.dtype) not in _NUMPY_DTYPES:
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
        tensor = _decoded(header, dtype, buffer)
    elif form.stored == 0:  # frombuffer refuses an empty buffer
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
    elif form.dense:
        tensor = torch.frombuffer(buffer, dtype=dtype).as_strided_(shape, strides)
    else:
        tensor = _spread(torch.frombuffer(buffer, dtype=dtype), header)
    return tensor.requires_grad_() if header.requires_grad else tensor


def _pack_any(tensor: torch.Tensor) -> tuple[TensorHeader, memoryview]:
    if not _can_travel(tensor):
        raise Unsendable(_complaint(tensor))
    plain = tensor.detach() if tensor.requires_grad else tensor
    shape = tuple(tensor.shape)
    strides, memory = _stored(plain, shape, tensor.stride())
    code, checksum, skew = CODES[tensor.dtype], crc32(memory), skew_of(tensor)
    return TensorHeader(code, shape, strides, tensor.requires_grad, len(memory), checksum, skew), memory


def _can_travel(tensor: torch.Tensor) -> bool:
    strided = type(tensor) in _TENSOR_TYPES and tensor.layout is torch.strided and tensor.dtype in CODES
    return strided and not tensor.is_nested and not tensor.is_meta


def _coded(tensor: torch.Tensor, codec: Codec) -> torch.Tensor | PackedTensor:
    if not _can_travel(tensor):
        return tensor
    shape, strides = tuple(tensor.shape), tensor.stride()
    stored = stored_shape(shape, strides)
    if coded_size(codec, tensor.dtype, stored) is None:
        return tensor
    packed = packed_strides(shape, strides)
    elements = tensor.detach().as_strided(stored, strides).cpu()
    content = encode_elements(codec, elements, packed)
    if content is None:
        return tensor
    memory = content.numpy().data
    kept = packed if layout(shape, strides).extent is None else strides
    code, skew = CODES[tensor.dtype], skew_of(tensor)
    header = CodedTensorHeader(code, shape, kept, tensor.requires_grad, len(memory), crc32(memory), skew, int(codec))
    return PackedTensor(header, memory)


def _decoded(header: TensorHeader, dtype: torch.dtype, content: memoryview) -> torch.Tensor:
    shape, strides = header.shape, header.strides
    stored, packed = stored_shape(shape, strides), packed_strides(shape, strides)
    tensor = empty(stored, strides, dtype, header.skew)
    decode_elements(Codec(header.codec), torch.frombuffer(content, dtype=torch.uint8), packed, tensor)
    return tensor.as_strided_(shape, strides)


def _complaint(tensor: torch.Tensor) -> str:
    if type(tensor) not in _TENSOR_TYPES:
        return f"a {type(tensor).__qualname__} cannot travel; send a tensor: .as_subclass(torch.Tensor)"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"a nested or {tensor.layout} tensor cannot travel; send .to_dense() or its parts"
    if tensor.is_meta:
        return "a meta tensor cannot travel: it has no values"
    return f"a {tensor.dtype} tensor cannot travel; convert it, for example with .dequantize()"


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
