"""Tensors in the header of a message: their entries, what these may announce, and tensors that a codec packs."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Annotated, ClassVar

import msgspec
import torch
from zlib_ng.zlib_ng import crc32

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

TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


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
        return decoded(packed.header, packed.memory) if isinstance(packed, PackedTensor) else packed

    return map_tensors(through, tree)


def can_travel(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` consists of numbers in strided memory, of a dtype in `DTYPES`."""
    strided = type(tensor) in TENSOR_TYPES and tensor.layout is torch.strided and tensor.dtype in CODES
    return strided and not tensor.is_nested and not tensor.is_meta


def _coded(tensor: torch.Tensor, codec: Codec) -> torch.Tensor | PackedTensor:
    if not can_travel(tensor):
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


def decoded(header: TensorHeader, content: memoryview) -> torch.Tensor:
    """Return the tensor of a checked header whose codec has written `content`. Raises `BadMessage` as that does."""
    shape, strides = header.shape, header.strides
    stored, packed = stored_shape(shape, strides), packed_strides(shape, strides)
    tensor = empty(stored, strides, DTYPES[header.dtype], header.skew)
    decode_elements(Codec(header.codec), torch.frombuffer(content, dtype=torch.uint8), packed, tensor)
    tensor.as_strided_(shape, strides)
    return tensor.requires_grad_() if header.requires_grad else tensor


def why_not(tensor: torch.Tensor) -> str:
    """Return why `tensor` cannot travel, with the way out."""
    if tensor.is_nested:
        return "a nested tensor cannot travel; send torch.nested.to_padded_tensor(tensor, 0)"
    if type(tensor) not in TENSOR_TYPES:
        return f"a {type(tensor).__qualname__} cannot travel; send a tensor: .as_subclass(torch.Tensor)"
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor cannot travel; send .to_dense() or its parts"
    if tensor.is_meta:
        return "a meta tensor cannot travel: it has no values"
    return f"a {tensor.dtype} tensor cannot travel; convert it, for example with .dequantize()"
