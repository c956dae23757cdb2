"""Lossy codecs, which write a tensor's elements in fewer bytes, and make elements of these again.

They are plain torch, without state: the bytes follow from the tensor alone, so a message that is computed again has the
same bytes.

    bf16    every element rounded to bfloat16: to the nearest, ties to even
    int8    a scale for every row, max |x| / 127 in float32; then round(x / scale) for every element

A row is of as few of the last dimensions as have `LEAST_ROW` elements together, and never of the first one, whose
elements are samples. So what becomes of a sample does not depend on the others of its microbatch.

Elements that would not come back as finite numbers have no bytes here: their tensor travels lossless, so NaN and
infinities arrive as they are. Shapes are those that a tensor is stored in: expanded dimensions count once.
"""

from enum import IntEnum
from math import prod

import torch
from torch import Tensor

from stageline.broker.errors import BadMessage
from stageline.pipeline.stage.layers.memory import Ints

LEAST_ROW = 64
_STEPS = 127.0  # of int8 on each side of zero


class Codec(IntEnum):
    """Codec by its number on the wire. A number is never reused."""

    LOSSLESS = 0
    BF16 = 1
    INT8 = 2


_ENCODED = {
    Codec.BF16: frozenset({torch.float32, torch.float64}),
    Codec.INT8: frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
}


def fault_of_codec(name: str, *, many: bool) -> str:
    """Return why a queue cannot have the codec `name`, "" if it can; `many` is True if a step has many messages."""
    names = [codec.name.lower() for codec in Codec]
    if name not in names:
        return f"codec={name!r}; expected one of {', '.join(names)}"
    if name != names[Codec.LOSSLESS] and not many:
        return f"codec={name!r}, and one message a step travels lossless; leave codec out"
    return ""


def coded_size(codec: int, dtype: torch.dtype, shape: Ints) -> int | None:
    """Return the number of bytes of elements of this dtype and shape, as `codec` writes them.

    Returns None where the codec would not make them fewer, or is unknown.

    Args:
        codec: Number of the codec.
        dtype: Dtype of the elements.
        shape: Shape that the tensor is stored in.
    """
    if codec not in _ENCODED or dtype not in _ENCODED[Codec(codec)]:
        return None
    count = prod(shape)
    if codec == Codec.BF16:
        size = 2 * count
    elif len(shape) > 1:
        size = count + _scales_size(shape)
    else:
        return None
    return size if size < count * dtype.itemsize else None


def encode_elements(codec: Codec, elements: Tensor, packed: Ints) -> Tensor | None:
    """Return the bytes of a tensor, uint8 [`coded_size`]; None if they would not come back as finite numbers.

    Args:
        codec: `BF16` or `INT8`.
        elements: Floating-point tensor on the CPU with any strides.
        packed: Strides, in elements, whose order the encoded elements have.
    """
    return _as_bfloat16(elements, packed) if codec == Codec.BF16 else _as_int8(elements, packed)


def decode_elements(codec: Codec, content: Tensor, packed: Ints, into: Tensor) -> None:
    """Write the elements in `content` to the tensor `into`.

    Args:
        codec: `BF16` or `INT8`.
        content: Bytes that `encode_elements` wrote, uint8 [`coded_size`].
        packed: Strides, in elements, whose order the encoded elements have.
        into: Floating-point tensor with any strides.

    Raises:
        BadMessage: `content` has scales that no encoder writes.
    """
    shape = tuple(into.shape)
    if codec == Codec.BF16:
        into.copy_(content.view(torch.bfloat16).as_strided(shape, packed))
        return
    size = _scales_size(shape)
    scales = content[:size].view(torch.float32).view(_scales_shape(shape))
    if not bool(((scales >= 0) & scales.isfinite()).all()):
        raise BadMessage("a tensor came with a scale that is negative or not finite")
    torch.mul(content[size:].view(torch.int8).as_strided(shape, packed), scales, out=into)


def _as_bfloat16(elements: Tensor, packed: Ints) -> Tensor | None:
    rounded = torch.empty_strided(tuple(elements.shape), packed, dtype=torch.bfloat16).copy_(elements)
    if not bool(rounded.isfinite().all()):
        return None
    return rounded.as_strided((rounded.numel(),), (1,)).view(torch.uint8)


def _as_int8(elements: Tensor, packed: Ints) -> Tensor | None:
    shape = tuple(elements.shape)
    values = elements.to(torch.float32)
    scales = values.abs().amax(tuple(range(_first_of_row(shape), len(shape))), keepdim=True).div_(_STEPS)
    if not bool((scales * _STEPS).isfinite().all()):
        return None
    size = _scales_size(shape)
    content = torch.empty(size + elements.numel(), dtype=torch.uint8)
    content[:size].view(torch.float32).view(scales.shape).copy_(scales)
    steps = values.div(scales.masked_fill(scales == 0, 1.0)).round_().clamp_(-_STEPS, _STEPS)
    content[size:].view(torch.int8).as_strided(shape, packed).copy_(steps)
    return content


def _first_of_row(shape: Ints) -> int:
    """Return the first of the dimensions that a row is of."""
    first, size = len(shape), 1
    while first > 1 and size < LEAST_ROW:
        first -= 1
        size *= shape[first]
    return first


def _scales_shape(shape: Ints) -> Ints:
    first = _first_of_row(shape)
    return (*shape[:first], *(1 for _ in shape[first:]))


def _scales_size(shape: Ints) -> int:
    return prod(shape[: _first_of_row(shape)]) * torch.float32.itemsize
