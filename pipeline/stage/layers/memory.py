"""Layout of tensors in memory. Messages and snapshots keep it: kernels choose by strides and alignment.

    dense       one block without gaps, dimensions in any order (channels_last is one)
    with gaps   distinct elements, unused memory between them (one of the parts of `chunk`)
    overlapping several indices share an element other than by expansion (`unfold`); the only layout that is not kept

An expanded dimension (stride 0) is stored once. Shapes, strides and sizes are in elements.

The address of the first element counts too: kernels differ for a slice that begins off an alignment boundary. Its skew,
the address modulo `ALIGNMENT` bytes, is kept with the layout.

A process of a group has a part of some tensors (torch's `DTensor`), which `whole` gathers. Nothing here imports
torch.distributed: a stage that one process computes has no such tensor, and need not load it.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

import torch

from stageline.pipeline.errors import StageError
from stageline.pipeline.tree import Tree, leaves, map_tensors, tensors

Ints = tuple[int, ...]
ALIGNMENT = 64  # bytes; what torch allocates on the CPU begins at a multiple of it


def is_split(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is split over the processes of a group."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, gathered if it is split: then every process of its group has to call this at once."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or if it is split, the part that is in this process."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def split_like(model: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` split as `model` is; `tensor` itself if `model` is not split, or has another shape.

    The processes do not communicate: every process of the group must have the whole of `tensor`.
    """
    mesh = getattr(model, "device_mesh", None)
    if mesh is None or model.shape != tensor.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(model.device), mesh, model.placements, src_data_rank=None)  # type: ignore[attr-defined]


class Layout(NamedTuple):
    """The size of a tensor in memory: `stored` elements lie within `extent` elements.

    Overlapping layouts have no extent: it is None.
    """

    stored: int
    extent: int | None

    @property
    def dense(self) -> bool:
        """True if the elements lie without gaps."""
        return self.stored == self.extent


@lru_cache(maxsize=1024)  # a run has few different layouts
def layout(shape: Ints, strides: Ints) -> Layout:
    """Return the layout of a tensor with this shape and these strides, none of them negative."""
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
    """Return the shape with every expanded dimension (stride 0) counted once."""
    return tuple(size if stride else min(size, 1) for size, stride in zip(shape, strides, strict=True))


def packed_strides(shape: Ints, strides: Ints) -> Ints:
    """Return strides of the dense layout with the same order of dimensions and the same dimensions expanded."""
    packed = [0] * len(shape)
    filled = 1
    for axis in sorted(range(len(shape)), key=lambda axis: (strides[axis], -axis)):
        if strides[axis]:
            packed[axis] = filled
            filled *= max(shape[axis], 1)
    return tuple(packed)


def skew_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's first element modulo `ALIGNMENT`, in bytes.

    0 on other devices than the CPU, where only torch allocates, and at addresses that are no multiple of the element
    size, which torch never uses.
    """
    if not tensor.is_cpu:
        return 0
    skew = tensor.data_ptr() % ALIGNMENT
    return 0 if skew % tensor.itemsize else skew


def empty(
    shape: Ints, strides: Ints, dtype: torch.dtype, skew: int = 0, device: torch.device | None = None
) -> torch.Tensor:
    """Return an uninitialised tensor of this layout.

    Args:
        shape: Shape of the tensor.
        strides: Strides in elements, not of an overlapping layout.
        dtype: Type of the elements.
        skew: Bytes from the alignment boundary to the first element.
        device: Device of the tensor; by default torch's default device.
    """
    if not skew:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    offset = skew // dtype.itemsize
    memory = torch.empty(offset + (layout(shape, strides).extent or 0), dtype=dtype, device=device)
    return memory.as_strided_(shape, strides, offset)


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf for autograd in memory of its own, since a layer may write to its input."""
    return copied(tensor.detach()).requires_grad_(tensor.requires_grad)


def copied(tensor: torch.Tensor, make: Callable[..., torch.Tensor] = empty) -> torch.Tensor:
    """Return a copy of `tensor` in the same layout on the same device, with gaps, expanded dimensions and skew.

    Overlapping layouts are packed, with the dimensions in the same order. Lazy conjugation and negation are resolved.

    Args:
        tensor: The tensor to copy.
        make: Makes the memory of the copy, with the arguments of `empty`.
    """
    shape, strides = tuple(tensor.shape), tensor.stride()
    if (
        make is empty
        and tensor.is_contiguous()
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
    copy = make(stored, kept, tensor.dtype, skew_of(tensor), tensor.device)
    return copy.copy_(tensor.as_strided(stored, strides)).as_strided_(shape, kept)


def parameter_like(former: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """Return `data` as a parameter; all else is as `former` has it."""
    parameter = torch.nn.Parameter(data, former.requires_grad)
    parameter.__dict__.update(former.__dict__)  # what libraries note on it
    return parameter


def gathering(layers: torch.nn.Module) -> Callable[[Callable[..., Tree]], Callable[..., Tree]]:
    """Return a decorator by which functions of `layers` return whole tensors.

    It returns the functions themselves unless processes split the layers.
    """
    if not any(map(is_split, layers.parameters())):
        return lambda run: run
    return lambda run: lambda *given: map_tensors(whole, run(*given))


class OutputGuard:
    """The rules by which outputs of a stage are safe to send: detached, sharing no memory with what changes.

    A retained message must never change, but an update writes to weights, a forward to buffers, an in-place layer to
    its input.
    """

    def __init__(self, layers: torch.nn.Module, stage: int) -> None:
        """Note the memory of weights and buffers.

        Args:
            layers: The stage's layers.
            stage: Number of the stage, for errors.
        """
        self._stage = stage
        self._owned = {_address(tensor) for tensor in (*layers.parameters(), *layers.buffers())} - {0}

    def sendable(self, tree: Tree, received: Tree) -> Tree:
        """Return `tree` detached, and copied where it shares memory with weights, buffers or what was `received`."""
        return map_tensors(partial(self._send, [_address(tensor) for tensor in tensors(received)]), tree)

    def refuse_aliases(self, output: Tree) -> None:
        """Raise `StageError` if two tensors of `output` share memory.

        They would arrive as two: an in-place layer would write to one of them only, and their gradients would be
        added up in another order.
        """
        seen: dict[int, str] = {}
        for path, leaf in leaves(output):
            if not isinstance(leaf, torch.Tensor) or not leaf.numel():
                continue
            if (first := seen.setdefault(leaf.data_ptr(), path)) != path:
                raise StageError(
                    f"stage {self._stage} returns the same memory twice, as output{first} and output{path}: send one, "
                    f"and derive the other in the next stage; or clone it"
                )

    def _send(self, taken: list[int], tensor: torch.Tensor) -> torch.Tensor:
        detached = tensor.detach()
        address = _address(detached)
        if address and (address in taken or address in self._owned):
            detached = copied(detached)
        return detached.requires_grad_() if tensor.requires_grad else detached


def _address(tensor: torch.Tensor) -> int:
    return own_part(tensor).untyped_storage().data_ptr()


def overlaps(named: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of every two neighbours in memory of which the first ends after the second begins.

    Elements of both may lie by turns between each other: that counts, too. All tensors must be on one device.
    """
    last, reached = "", 0
    for begin, end, name in sorted(_span(tensor, name) for name, tensor in named.items() if _has_memory(tensor)):
        if begin < reached:
            yield last, name
        if end > reached:
            last, reached = name, end


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _span(tensor: torch.Tensor, name: str) -> tuple[int, int, str]:
    """Return the addresses of the tensor's first byte and of the one after its last, and `name`."""
    begin = tensor.data_ptr()
    furthest = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (furthest + 1) * tensor.itemsize, name
