"""Received tensors enter autograd as inner nodes, which a first layer may write to and which keep the gradient as is.

A leaf would do neither. It refuses in-place layers, and its `.grad` is copied to the leaf's own strides: the stage
before would continue from another layout than the unsplit model does, and bits follow layouts.
"""

from itertools import count
from typing import Any

import torch
from torch import Tensor

from stageline.pipeline.tree import Tree, map_leaves


class InputNodes:
    """The input nodes of one microbatch: one for each tensor of the received `x` that requires a gradient."""

    __slots__ = ("_nodes", "_places")

    def __init__(self, x: Tree) -> None:
        self._places = _places(x)
        self._nodes: list[InputNode] = []

    def enter(self, tensor: Tensor) -> Tensor:
        """Makes the next of these tensors, in the order of `leaves`, a node of the graph."""
        self._nodes.append(InputNode())
        return enter(tensor, self._nodes[-1])

    def gradients(self) -> Tree:
        """The tree of `x` with the gradients, None for leaves that carry none; None if no leaf does."""
        if not self._nodes:
            return None
        return map_leaves(lambda place: self._nodes[place].gradient if isinstance(place, int) else None, self._places)


class InputNode:
    """The gradient with respect to a received tensor; None before backward, and if there is none."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None


def enter(tensor: Tensor, node: InputNode) -> Tensor:
    """Makes `tensor` itself a node of the graph, which owns it from now on. Call this once for each tensor."""
    return _Enter.apply(tensor, _anchor, node)  # type: ignore[no-any-return, no-untyped-call]


class _Enter(torch.autograd.Function):
    """Since it is marked dirty, the tensor itself is the function's output. The anchor, a number that requires a
    gradient and gets none, makes autograd call `backward`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor, node: InputNode) -> Tensor:
        ctx.mark_dirty(tensor)
        ctx.node = node
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[None, None, None]:
        ctx.node.gradient = gradient[0]
        return None, None, None


def _places(x: Tree) -> Tree:
    """The tree of `x` with the numbers 0, 1, ... for tensors that require a gradient, None for other leaves."""
    if isinstance(x, Tensor):
        return 0 if x.requires_grad else None
    numbers = count()
    return map_leaves(lambda leaf: next(numbers) if isinstance(leaf, Tensor) and leaf.requires_grad else None, x)


_anchor = torch.zeros((), requires_grad=True)
