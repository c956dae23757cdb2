"""Allocates tensors that lie in memory as others do: same strides, same skew. Kernels choose by both; bits follow."""

import torch
from torch import Tensor

from .layout import ALIGNMENT, Ints, layout, packed_strides, stored_shape


def skew_of(tensor: Tensor) -> int:
    """The address of the tensor's first element modulo `ALIGNMENT`, in bytes.

    0 on other devices, where only torch allocates, and at addresses that are no multiple of the element size, which
    torch never uses.
    """
    if not tensor.is_cpu:
        return 0
    skew = tensor.data_ptr() % ALIGNMENT
    return 0 if skew % tensor.itemsize else skew


def empty(shape: Ints, strides: Ints, dtype: torch.dtype, skew: int = 0, device: torch.device | None = None) -> Tensor:
    """An uninitialised tensor of this layout (not an overlapping one), `skew` bytes off the alignment boundary."""
    if not skew:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    offset = skew // dtype.itemsize
    memory = torch.empty(offset + (layout(shape, strides).extent or 0), dtype=dtype, device=device)
    return memory.as_strided_(shape, strides, offset)


def copied(tensor: Tensor) -> Tensor:
    """A copy on the same device that lies as `tensor` does: gaps, expanded dimensions and skew included.

    Overlapping layouts are packed, with the dimensions in the same order. Lazy conjugation and negation are resolved.
    """
    shape, strides = tuple(tensor.shape), tensor.stride()
    if (
        tensor.is_contiguous()
        and tensor.is_cpu
        and not skew_of(tensor)
        and not tensor.is_conj()
        and not tensor.is_neg()
    ):
        copy = tensor.clone()
        if copy.stride() == strides:
            return copy
    stored = stored_shape(shape, strides)
    kept = packed_strides(shape, strides) if layout(shape, strides).extent is None else strides
    copy = empty(stored, kept, tensor.dtype, skew_of(tensor), tensor.device)
    return copy.copy_(tensor.as_strided(stored, strides)).as_strided_(shape, kept)
