"""How a tensor's elements lie in memory. Dense layouts travel as they are: kernels choose by layout, and bits follow.

A layout is dense when its elements fill one block without gaps or overlaps, in any order of dimensions (channels_last
is one), dimensions expanded with stride 0 not counted: those are stored once. Shapes and strides are in elements.
"""

from functools import lru_cache

Ints = tuple[int, ...]


@lru_cache(maxsize=4096)
def block_size(shape: Ints, strides: Ints) -> int | None:
    """How many elements a dense layout occupies; None if the layout is not dense."""
    if 0 in shape:
        return 0
    filled = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride != filled:
            return None
        filled *= size
    return filled


def packed_strides(shape: Ints, strides: Ints) -> Ints:
    """Strides of the dense layout that keeps the order of dimensions and what is expanded."""
    packed = [0] * len(shape)
    filled = 1
    for axis in sorted(range(len(shape)), key=lambda axis: (strides[axis], -axis)):
        if strides[axis]:
            packed[axis] = filled
            filled *= max(shape[axis], 1)
    return tuple(packed)


def stored_shape(shape: Ints, strides: Ints) -> Ints:
    """The shape with every expanded dimension counted once: what has to be copied."""
    return tuple(size if stride else min(size, 1) for size, stride in zip(shape, strides, strict=True))
