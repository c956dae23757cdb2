"""Places tensors in memory as others lie: same strides, same skew. Kernels choose by both, and bits follow."""

import torch
from torch import Tensor

from .layout import ALIGNMENT, Ints, layout, stored_shape


def skew_of(tensor: Tensor) -> int:
    """The address of the tensor's first element modulo `ALIGNMENT`, in bytes; 0 where only torch allocates."""
    if not tensor.is_cpu:
        return 0
    skew = tensor.data_ptr() % ALIGNMENT
    return 0 if skew % tensor.itemsize else skew


def empty(shape: Ints, strides: Ints, dtype: torch.dtype, skew: int = 0) -> Tensor:
    """An uninitialised CPU tensor of this layout (not an overlapping one), `skew` bytes off the alignment boundary."""
    if not skew:
        return torch.empty_strided(shape, strides, dtype=dtype)
    offset = skew // dtype.itemsize
    memory = torch.empty(offset + (layout(shape, strides).extent or 0), dtype=dtype)
    return memory.as_strided_(shape, strides, offset)


def copied(tensor: Tensor) -> Tensor:
    """A copy that lies as `tensor` does, gaps, expanded dimensions and skew included; an overlapping one is packed."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if not tensor.is_cpu or layout(shape, strides).extent is None:
        return tensor.clone()
    stored = stored_shape(shape, strides)
    copy = empty(stored, strides, tensor.dtype, skew_of(tensor)).copy_(tensor.as_strided(stored, strides))
    return copy if stored == shape else copy.as_strided(shape, strides)
