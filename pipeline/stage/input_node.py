"""Where a received tensor enters autograd: as an inner node, since a first layer may write to it, and one that keeps
the gradient just as it arrives.

A leaf would do neither. It refuses in-place layers, and its `.grad` is laid out anew in the leaf's own strides: the
stage before would then go on from another layout than the unsplit model does, and bits follow layouts.
"""

from itertools import count
from typing import Any

import torch
from torch import Tensor

from stageline.pipeline.tree import Tree, map_leaves


class InputNodes:
    """The inlets of one microbatch: one for each tensor of the received `x` that requires a gradient."""

    __slots__ = ("_inlets", "_places")

    def __init__(self, x: Tree) -> None:
        self._places = _places(x)
        self._inlets: list[InputNode] = []

    def enter(self, tensor: Tensor) -> Tensor:
        """The next of these tensors, in the order of `leaves`, as a node of the graph."""
        self._inlets.append(InputNode())
        return enter(tensor, self._inlets[-1])

    def gradients(self) -> Tree:
        """The tree of `x` with what has arrived, None for what carries no gradient; None if nothing in it does."""
        if not self._inlets:
            return None
        return map_leaves(lambda place: self._inlets[place].gradient if isinstance(place, int) else None, self._places)


class InputNode:
    """Keeps the gradient that has arrived at a received tensor; None before, and if there is none."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None


def enter(tensor: Tensor, inlet: InputNode) -> Tensor:
    """`tensor`, without a copy, as a node of the graph; from now on it is the graph's own. Hand it in only once."""
    return _Enter.apply(tensor, _anchor, inlet)  # type: ignore[no-any-return, no-untyped-call]


class _Enter(torch.autograd.Function):
    """Marked dirty, the tensor itself is the function's output. The anchor, a number that requires a gradient and gets
    none, is what makes autograd come here."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor, inlet: InputNode) -> Tensor:
        ctx.mark_dirty(tensor)
        ctx.inlet = inlet
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[None, None, None]:
        ctx.inlet.gradient = gradient[0]
        return None, None, None


def _places(x: Tree) -> Tree:
    """The tree of `x` with the numbers 0, 1, ... for the tensors that require a gradient, None for all else."""
    if isinstance(x, Tensor):
        return 0 if x.requires_grad else None
    numbers = count()
    return map_leaves(lambda leaf: next(numbers) if isinstance(leaf, Tensor) and leaf.requires_grad else None, x)


_anchor = torch.zeros((), requires_grad=True)
