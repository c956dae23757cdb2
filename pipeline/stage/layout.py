"""How a tensor's elements lie in memory. Messages and snapshots keep it: kernels choose by strides, and bits follow.

    dense       one block without gaps, dimensions in any order (channels_last is one)
    with gaps   distinct elements, unused memory between them (one of the parts of `chunk`)
    overlapping several indices share an element other than by expansion (`unfold`); the only layout that is not kept

An expanded dimension (stride 0) is stored once. Shapes, strides and sizes are in elements.

The address of the first element counts too: kernels differ for a slice that begins off an alignment boundary. Its skew,
the address modulo `ALIGNMENT` bytes, is kept with the layout.
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

Ints = tuple[int, ...]
ALIGNMENT = 64  # bytes; what torch allocates on the CPU begins at a multiple of it


class Layout(NamedTuple):
    """`stored` elements lie within `extent` elements of memory. Overlapping layouts have no extent."""

    stored: int
    extent: int | None

    @property
    def dense(self) -> bool:
        return self.stored == self.extent


@lru_cache(maxsize=1024)  # a run has few different layouts
def layout(shape: Ints, strides: Ints) -> Layout:
    """The layout of a tensor with this shape and these strides, none of them negative."""
    stored = prod(stored_shape(shape, strides))
    if stored == 0:
        return Layout(0, 0)
    extent = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride < extent:
            return Layout(stored, None)
        extent += stride * (size - 1)
    return Layout(stored, extent)


def stored_shape(shape: Ints, strides: Ints) -> Ints:
    """The shape with every expanded dimension counted once."""
    return tuple(size if stride else min(size, 1) for size, stride in zip(shape, strides, strict=True))


def packed_strides(shape: Ints, strides: Ints) -> Ints:
    """Strides of the dense layout with the same order of dimensions and the same ones expanded."""
    packed = [0] * len(shape)
    filled = 1
    for axis in sorted(range(len(shape)), key=lambda axis: (strides[axis], -axis)):
        if strides[axis]:
            packed[axis] = filled
            filled *= max(shape[axis], 1)
    return tuple(packed)
