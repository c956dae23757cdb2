"""What a stage is given, on its device: as it came, as memory of the stage's own, or as nodes of the graph."""

from functools import partial

import torch

from stageline.pipeline.stage.layers.memory import copied
from stageline.pipeline.tree import Tree, map_tensors

from .stash import InputNodes


class Arrivals:
    """Brings trees of tensors to `device`. Where a tree is `owned`, the stage may write to its memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def here(self, tree: Tree) -> Tree:
        """The tree, its tensors copied only if they are on another device."""
        return map_tensors(self._here, tree)

    def own(self, tree: Tree, *, owned: bool) -> Tree:
        """The tree, detached, in memory that the stage may write to."""
        return map_tensors(partial(self._own, owned), tree)

    def entered(self, tree: Tree, nodes: InputNodes, *, owned: bool) -> Tree:
        """The same, where tensors that require a gradient have entered the graph as `nodes`."""
        return map_tensors(partial(self._enter, nodes, owned), tree)

    def _enter(self, nodes: InputNodes, owned: bool, tensor: torch.Tensor) -> torch.Tensor:
        mine = self._own(owned, tensor)
        return nodes.enter(mine) if tensor.requires_grad else mine

    def _own(self, owned: bool, tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor.detach()
        here = self._here(mine)
        return here if owned or here is not mine else copied(here)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == self.device else tensor.to(self.device)
