"""A backward needs of its forward: the input as nodes of the graph, the outputs, and the gradients that fit them.

Received tensors enter autograd as inner nodes, which a first layer may write to and which keep the gradient as is.
A leaf would do neither. It refuses in-place layers, and its `.grad` is copied to the leaf's own strides: the stage
before would continue from another layout than the unsplit model does, and bits follow layouts.
`Arrivals` brings received trees to the stage's device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import msgspec
import torch

from stageline.pipeline.errors import GradientMismatch, StageError
from stageline.pipeline.stage.layers.body import Weights
from stageline.pipeline.stage.layers.memory import copied
from stageline.pipeline.tree import Leaf, Tree, describe, leaves, map_leaves, map_tensors, tensors

Key = tuple[int, int]  # step, microbatch


@dataclass(frozen=True, slots=True)
class Version:
    """What one forward reads and later actions change, by the body's names: trainable parameters, as leaves of their
    own, and the buffers as they were before it. `rerun`: the forward has run before, in another process."""

    weights: Weights
    buffers: Weights
    rerun: bool = False


PRESENT = Version({}, {})  # the parameters and buffers themselves


def present(key: Key) -> Version:
    """Return the only version that there is where none is kept."""
    return PRESENT


class InputNodes:
    """The input nodes of one microbatch: one for each tensor of the received `x` that requires a gradient."""

    __slots__ = ("_gradients", "_places")

    def __init__(self, x: Tree) -> None:
        self._places = _places(x)
        self._gradients: list[torch.Tensor | None] = []

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes the next of these tensors, in the order of `leaves`, itself a node of the graph, which then owns it."""
        self._gradients.append(None)
        return _Enter.apply(tensor, _anchor, self._gradients, len(self._gradients) - 1)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def anchor(self) -> torch.Tensor | None:
        """The leaf that every node leads to; None if there are no nodes."""
        return _anchor if self._gradients else None

    def gradients(self) -> Tree:
        """The tree of `x` with the gradients, None for leaves that carry none; None if no leaf does."""
        if not self._gradients:
            return None
        return map_leaves(lambda place: self._gradients[place] if isinstance(place, int) else None, self._places)


class _Enter(torch.autograd.Function):
    """Since it is marked dirty, the tensor itself is the function's output. The anchor, a number that requires a
    gradient and gets none, makes autograd call `backward`, which puts the gradient at its `place` in the list."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor, gradients: list[torch.Tensor | None], place: int
    ) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        ctx.gradients = gradients
        ctx.place = place
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.gradients[ctx.place] = gradient[0]
        return None, None, None, None


def _places(x: Tree) -> Tree:
    """The tree of `x` with the numbers 0, 1, ... for tensors that require a gradient, None for other leaves."""
    if isinstance(x, torch.Tensor):
        return 0 if x.requires_grad else None
    numbers = count()
    return map_leaves(lambda leaf: next(numbers) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None, x)


_anchor = torch.zeros((), requires_grad=True)


class Passage(msgspec.Struct, frozen=True):
    """One microbatch on its way through a stage: its key, the nodes of its input, its version of the weights, and what
    the loss compares its output with."""

    key: Key
    input_nodes: InputNodes
    version: Version = PRESENT
    target: Tree = None


Run = Callable[[Tree, Passage], Tree]  # computes a stage's output, or its loss, of the input of a microbatch
Backward = Callable[[Version, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]  # from outputs with gradients


class Stashed(msgspec.Struct):
    """One forward: its outputs with their graph, the nodes of its input, and its version of the weights."""

    outputs: Tree
    share: float | None  # the weight of a loss; None for an activation
    input_nodes: InputNodes
    version: Version
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
        return map_tensors(lambda loss: torch.full_like(loss, share), self.outputs)


class Stash:
    """The forwards of stage number `stage` that have not gone backward yet; in `kept`, the oldest first."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.kept: dict[Key, Stashed] = {}

    def require_absent(self, key: Key) -> None:
        """Raises `StageError` if microbatch `key` is stashed already."""
        if key in self.kept:
            raise StageError(
                f"stage {self._stage} already holds microbatch {key[1]} of step {key[0]}, not yet backward"
            )

    def put(self, passage: Passage, outputs: Tree, share: float | None) -> None:
        """Stashes one forward, if it will go backward or has a version of its own, which is in use until then."""
        if isinstance(outputs, torch.Tensor):
            requires_grad = outputs.requires_grad
        else:
            requires_grad = any(leaf.requires_grad for leaf in tensors(outputs))
        if requires_grad or passage.version is not PRESENT:
            self.kept[passage.key] = Stashed(outputs, share, passage.input_nodes, passage.version, requires_grad)

    def key(self, step: int | None, microbatch: int | None) -> Key:
        """The named forward, or the oldest that is stashed. Raises `StageError` if there is no oldest one."""
        if step is not None and microbatch is not None:
            return step, microbatch
        if not self.kept:
            raise StageError(f"stage {self._stage} has nothing to run backward: call forward first")
        return next(iter(self.kept))


def matched(outputs: Tree, gradient: Tree, stage: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs that take part in backward, and their gradients. An output without a gradient takes no part.

    Raises `GradientMismatch`, which names `stage`, the gradient and the output, unless each gradient is at the place
    of an output of the same shape and dtype.
    """
    if isinstance(outputs, torch.Tensor) and _fits(outputs, gradient):
        return [outputs], [gradient]  # type: ignore[list-item]  # only a tensor fits
    found = {path: given for path, given in leaves(gradient) if given is not None}
    taking_part, gradients = [], []
    for path, output in leaves(outputs):
        given = found.pop(path, None)
        if given is None:
            continue
        if not _fits(output, given):
            raise _mismatch(stage, path, output, given)
        taking_part.append(output)
        gradients.append(given)
    for path, extra in found.items():
        raise _mismatch(stage, path, None, extra)
    return taking_part, gradients  # type: ignore[return-value]  # only tensors fit


def _fits(output: Leaf, gradient: Tree) -> bool:
    if not isinstance(output, torch.Tensor) or not isinstance(gradient, torch.Tensor) or not output.requires_grad:
        return False
    return gradient.shape == output.shape and gradient.dtype == output.dtype


def _mismatch(stage: int, path: str, output: Leaf, given: Leaf) -> GradientMismatch:
    return GradientMismatch(
        f"stage {stage} got a gradient of {describe(given)} for output{path}, which is {describe(output)}. "
        f"Expected the gradient with respect to the activation that the stage sent, of the same shape and dtype, "
        f"not the gradient of a weight: what the next stage's backward() returns."
    )


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
