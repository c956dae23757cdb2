"""Notices that a tensor was written to after it was put: then its retained bytes are not what was sent."""

from dataclasses import dataclass

from torch import Tensor

from pipeline.tree import Tree, tensors


@dataclass(frozen=True, slots=True)
class Seal:
    """Tensors with the versions they had (torch counts every in-place write to a tensor and its views)."""

    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]

    @property
    def broken(self) -> bool:
        """Whether one of the tensors has been written to since."""
        return any(tensor._version != version for tensor, version in zip(self.tensors, self.versions, strict=True))


def seal(payload: Tree) -> Seal:
    """Seals what a retained message shares memory with: the tensors in it that are on the CPU."""
    found = [payload] if isinstance(payload, Tensor) else tensors(payload)
    watched = [_outside_autograd(tensor) for tensor in found if tensor.is_cpu and not tensor.is_inference()]
    return Seal(tuple(watched), tuple([tensor._version for tensor in watched]))


def _outside_autograd(tensor: Tensor) -> Tensor:
    """The same memory and version, without the graph, which retention would keep alive."""
    return tensor.detach() if tensor.requires_grad else tensor
