"""One microbatch's way through a stage: it arrives, enters autograd, runs through seeded layers, and is stashed.

    x ─> Arrivals ─> InputNodes ─> SeededLayers ─> Stash ... the gradient comes back ─> matched() ─> gradients()

Received tensors enter autograd as inner nodes, which a first layer may write to and which keep the gradient as is.
A leaf would do neither. It refuses in-place layers, and its `.grad` is copied to the leaf's own strides: the stage
before would continue from another layout than the unsplit model does, and bits follow layouts.

Random generators are seeded before each layer, so that its numbers depend on nothing else. `SeededLayers` knows which
layer ran last, for people who ask why a worker waits, or which layer failed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import count
from typing import Any

import msgspec
import torch

from stageline.pipeline.errors import GradientMismatch, StageError
from stageline.pipeline.stage.layers.body import Weights
from stageline.pipeline.stage.layers.memory import copied
from stageline.pipeline.tree import Leaf, Tree, describe, leaves, map_leaves, map_tensors, tensors

Key = tuple[int, int]  # step, microbatch
LOSS, OPTIMIZER, LR_SCHEDULER = "the loss", "the optimizer", "the learning rate scheduler"  # in place of a layer's name
GRADIENTS = "the gradients"  # likewise
Layer = Callable[[Any], Any]
Tap = Callable[[str, Tree], object]  # of a layer's name and what it returned, neither of which it may change


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


def default_generators(device: torch.device) -> list[torch.Generator]:
    """The generators that layers on `device` draw from: torch's default ones of the CPU and of the device."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call]  # fills default_generators
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """A context in which the default generators of the CPU and of `device` may be seeded and drawn from. At its end,
    also after an exception, they are in the state that they had."""
    kept = [(generator, generator.get_state()) for generator in default_generators(device)]
    try:
        yield
    finally:
        for generator, state in kept:
            generator.set_state(state)


class SeededLayers:
    """Layers of a stage in their order, which draw from generators that `run` seeds before each of them.

    Args:
        layers: What computes each layer: the module, or a function that calls it.
        names: Of the layers.
        first_layer: Number of the first one in the unsplit model; each is seeded by its own.
        seed: The run's.
        device: On which they draw, besides the CPU: from torch's default generators.
    """

    def __init__(
        self, layers: Sequence[Layer], names: Sequence[str], *, first_layer: int, seed: int, device: torch.device
    ) -> None:
        self._layers = [(first_layer + place, *each) for place, each in enumerate(zip(names, layers, strict=True))]
        self._told = self._layers
        self._seed = seed
        self._names = frozenset(names)
        self._generators = default_generators(device)
        self.at = next(iter(names), LOSS)  # the layer that ran last, or what else of the stage did

    def __str__(self) -> str:
        """ "layer 3", "the loss"."""
        return f"layer {self.at}" if self.at in self._names else self.at

    def note(self, what: str) -> None:
        """Note what of the stage runs now: "the optimizer"."""
        self.at = what

    def run(self, x: Tree, passage: Passage, *, again: bool = False) -> Tree:
        """Return what the last layer returns for a microbatch of which the first gets `x`. Raises what a layer raises.

        Args:
            x: Input of the first layer.
            passage: The microbatch's.
            again: True if the layers have run for this microbatch before: no tap is told once more.
        """
        for number, name, layer in self._layers if again else self._told:
            self.at = name
            seed = layer_seed(self._seed, *passage.key, number)
            for generator in self._generators:
                generator.manual_seed(seed)
            x = layer(x)
        return x

    @contextmanager
    def tapped(self, tap: Tap) -> Iterator[None]:
        """A context in which `tap` is given what each layer returns, before the next layer may write to it."""
        self._told = [(number, name, partial(_tell, tap, name, layer)) for number, name, layer in self._layers]
        try:
            yield
        finally:
            self._told = self._layers


def _tell(tap: Tap, name: str, layer: Layer, x: Tree) -> Tree:
    output: Tree = layer(x)
    tap(name, output)
    return output


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """The seed of the generators before `layer`, numbered in the unsplit model: it does not depend on the cut."""
    return int.from_bytes(sha256(f"{seed}/{step}/{microbatch}/{layer}".encode()).digest()[:8], "little")
