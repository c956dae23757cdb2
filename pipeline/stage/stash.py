"""The stash: what backward needs of each forward that has not gone backward yet."""

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from stageline.pipeline.errors import GradientMismatch, StageError
from stageline.pipeline.tree import Tree, describe, leaves, map_tensors, tensors

from .input_node import InputNodes
from .versions import Key, Version


class Stashed(msgspec.Struct):
    """One forward: its outputs with their graph, the nodes of its input, and its version of the weights."""

    outputs: Tree
    share: float | None  # the weight of a loss; None for an activation
    input_nodes: InputNodes
    version: Version | None  # None without weight stashing
    requires_grad: bool  # whether any of the outputs does

    def gradient_of_loss(self, stage: int) -> Tree:
        """The gradient of the batch's loss with respect to this output.

        Raises `GradientMismatch` if the output is an activation.
        """
        if self.share is None:
            sent = ", ".join(describe(leaf) for _, leaf in leaves(self.outputs))
            raise GradientMismatch(
                f"stage {stage} sent an activation ({sent}), not a loss: backward() needs the gradient "
                f"with respect to it, which the next stage's backward() returns"
            )
        share = self.share
        return map_tensors(lambda loss: torch.ones_like(loss) * share, self.outputs)


class Stash:
    """The forwards of stage number `stage`, the oldest first."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._kept: dict[Key, Stashed] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def require_absent(self, key: Key) -> None:
        """Raises `StageError` if microbatch `key` is stashed already."""
        if key in self._kept:
            raise StageError(
                f"stage {self._stage} already holds microbatch {key[1]} of step {key[0]}, not yet backward"
            )

    def put(
        self, key: Key, outputs: Tree, share: float | None, input_nodes: InputNodes, version: Version | None
    ) -> None:
        """Stashes one forward, if it will go backward or has a version of the weights, which is in use until then."""
        requires_grad = _requires_grad(outputs)
        if requires_grad or version is not None:
            self._kept[key] = Stashed(outputs, share, input_nodes, version, requires_grad)

    def pop(self, step: int | None, microbatch: int | None) -> Stashed | None:
        """Removes and returns the named forward, None if it was not stashed; by default the oldest one.

        Raises `StageError` if there is no oldest one.
        """
        if step is not None and microbatch is not None:
            return self._kept.pop((step, microbatch), None)
        if not self._kept:
            raise StageError(f"stage {self._stage} has nothing to run backward: call forward first")
        return self._kept.pop(next(iter(self._kept)))

    def versions(self) -> Iterator[tuple[Key, Version]]:
        """The versions of the weights that the stashed forwards ran with."""
        return ((key, stashed.version) for key, stashed in self._kept.items() if stashed.version is not None)

    def clear(self) -> None:
        self._kept.clear()


def _requires_grad(tree: Tree) -> bool:
    if isinstance(tree, Tensor):
        return tree.requires_grad
    return any(tensor.requires_grad for tensor in tensors(tree))
