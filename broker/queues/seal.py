"""Notices that a tensor was written to after it was put: then its retained bytes are not what was sent."""

from torch import Tensor

from stageline.pipeline.tree import Tree, tensors


class Seal:
    """Holds the tensors of `payload` that a retained message shares memory with, those on the CPU, and the versions
    they have now: torch counts every in-place write to a tensor and to its views."""

    __slots__ = ("_versions",)

    def __init__(self, payload: Tree) -> None:
        found = (payload,) if isinstance(payload, Tensor) else tensors(payload)
        self._versions = [
            (tensor.detach() if tensor.grad_fn is not None else tensor, tensor._version)  # no graph is kept alive
            for tensor in found
            if tensor.is_cpu and not tensor.is_inference()
        ]

    @property
    def broken(self) -> bool:
        """Whether one of the tensors has been written to since."""
        for tensor, version in self._versions:  # noqa: SIM110  # any() takes three times as long
            if tensor._version != version:
                return True
        return False
