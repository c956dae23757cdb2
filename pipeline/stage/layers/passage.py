"""The way of one microbatch through a stage: arrival, seeded layers, stash.

    x ─> Arrivals ─> InputNodes ─> SeededLayers ─> Stash ... the gradient comes back ─> matched() ─> gradients()

Received tensors enter autograd as inner nodes, which a first layer may write to and which keep the gradient as is.
A leaf refuses in-place layers, and its `.grad` is copied to its own strides: the stage before would continue from
another layout than the unsplit model does, and bits follow layouts.
Random generators are seeded before each layer, so that its numbers depend on nothing else.
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
from stageline.pipeline.tree import Leaf, Tree, describe, describe_values, leaves, map_leaves, map_tensors, tensors

Key = tuple[int, int]  # step, microbatch
# In place of a layer's name:
LOSS, OPTIMIZER, LR_SCHEDULER, GRADIENTS = "the loss", "the optimizer", "the learning rate scheduler", "the gradients"
Layer = Callable[[Any], Any]
Tap = Callable[[str, Tree], object]  # of a layer's name and what it returned, neither of which it may change


@dataclass(frozen=True, slots=True)
class Version:
    """The tensors that one forward reads and later actions change, by the body's names.

    Attributes:
        weights: Trainable parameters, as leaves of their own.
        buffers: Buffers as they were before the forward.
        rerun: True if the forward has run before, in another process.
    """

    weights: Weights
    buffers: Weights
    rerun: bool = False


PRESENT = Version({}, {})  # the parameters and buffers themselves


def present(key: Key) -> Version:
    """Return `PRESENT`, the only version of a stage that keeps none."""
    return PRESENT


class InputNodes:
    """The input nodes of one microbatch: one for each tensor of the input that requires a gradient."""

    __slots__ = ("_gradients", "_places")

    def __init__(self, x: Tree) -> None:
        """Note the places of tensors in the input `x` that require a gradient."""
        self._places = _places(x)
        self._gradients: list[torch.Tensor | None] = []

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make `tensor` itself a node of the graph, which then owns it, and return it.

        Called for the tensors that require a gradient, in the order of `leaves`.
        """
        self._gradients.append(None)
        return _Enter.apply(tensor, _anchor, self._gradients, len(self._gradients) - 1)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def anchor(self) -> torch.Tensor | None:
        """The leaf that every node leads to; None if there are no nodes."""
        return _anchor if self._gradients else None

    def gradients(self) -> Tree:
        """Return the gradients in the tree of the input, None for leaves that carry none; None if no leaf does."""
        if not self._gradients:
            return None
        return map_leaves(lambda place: self._gradients[place] if isinstance(place, int) else None, self._places)


class _Enter(torch.autograd.Function):
    """The function of autograd that makes a received tensor a node of the graph.

    The tensor is marked dirty, so it is itself the function's output. The anchor, a number that requires a gradient and
    gets none, makes autograd call `backward`, which puts the gradient at its `place` in the list.
    """

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
    """Return the tree of `x` with the numbers 0, 1, ... for tensors that require a gradient, None for other leaves."""
    if isinstance(x, torch.Tensor):
        return 0 if x.requires_grad else None
    numbers = count()
    return map_leaves(lambda leaf: next(numbers) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None, x)


_anchor = torch.zeros((), requires_grad=True)


class Passage(msgspec.Struct, frozen=True):
    """A microbatch on its way through a stage.

    Attributes:
        key: Step and microbatch.
        input_nodes: Nodes of its input.
        version: Version of the weights that it reads.
        target: Target that the loss compares its output with; None if no loss is computed.
    """

    key: Key
    input_nodes: InputNodes
    version: Version = PRESENT
    target: Tree = None


Run = Callable[[Tree, Passage], Tree]  # computes a stage's output, or its loss, of the input of a microbatch
Backward = Callable[[Version, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]  # from outputs with gradients


class Stashed(msgspec.Struct):
    """A forward that waits for its backward: its outputs with their graph, input nodes and version of the weights."""

    outputs: Tree
    share: float | None  # the weight of a loss; None for an activation
    input_nodes: InputNodes
    version: Version
    requires_grad: bool  # whether any of the outputs does

    def drop_outputs(self) -> None:
        """Keep the outputs alive no longer."""
        self.outputs = None

    def gradient_of_loss(self, stage: int) -> Tree:
        """Return the gradient of the batch's loss with respect to this output.

        Raises `GradientMismatch`, which names `stage`, if the output is an activation.
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
    """The forwards of one stage that have not gone backward yet.

    Attributes:
        kept: Forwards by step and microbatch, the oldest first.
    """

    def __init__(self, stage: int) -> None:
        """Begin empty. `stage` is the stage's number, for errors."""
        self._stage = stage
        self.kept: dict[Key, Stashed] = {}

    def require_absent(self, key: Key) -> None:
        """Raise `StageError` if microbatch `key` is stashed already."""
        if key in self.kept:
            raise StageError(
                f"stage {self._stage} already holds microbatch {key[1]} of step {key[0]}, not yet backward"
            )

    def put(self, passage: Passage, outputs: Tree, share: float | None) -> None:
        """Stash one forward, if it will go backward or has a version of its own, which is in use until then.

        Args:
            passage: The microbatch.
            outputs: Outputs with their graph.
            share: Factor of a loss in the batch's loss; None for an activation.
        """
        if isinstance(outputs, torch.Tensor):
            requires_grad = outputs.requires_grad
        else:
            requires_grad = any(leaf.requires_grad for leaf in tensors(outputs))
        if requires_grad or passage.version is not PRESENT:
            self.kept[passage.key] = Stashed(outputs, share, passage.input_nodes, passage.version, requires_grad)

    def key(self, step: int | None, microbatch: int | None) -> Key:
        """Return the key of the named forward, or of the oldest if a number is None; `StageError` if there is none."""
        if step is not None and microbatch is not None:
            return step, microbatch
        if not self.kept:
            raise StageError(f"stage {self._stage} has nothing to run backward: call forward first")
        return next(iter(self.kept))


def matched(outputs: Tree, gradient: Tree, stage: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs that take part in backward, and their gradients. An output without a gradient takes no part.

    Args:
        outputs: Outputs of a forward.
        gradient: Gradients with respect to `outputs`, at the same places; None for an output that gets none.
        stage: Number of the stage, for errors.

    Raises:
        GradientMismatch: A gradient is not at the place of an output that requires one, of the same shape and dtype.
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
    """The arrival of trees of tensors on a stage's device.

    Some methods take `owned`: True if the stage may write to the memory of the tree.
    """

    def __init__(self, device: torch.device) -> None:
        """Take the stage's device."""
        self.device = device

    def here(self, tree: Tree) -> Tree:
        """Return the tree on the device. Tensors are copied only if they are on another device."""
        return map_tensors(self._here, tree)

    def own(self, tree: Tree, *, owned: bool) -> Tree:
        """Return the tree, detached, in memory that the stage may write to.

        Tensors are copied unless they are `owned` or come from another device.
        """
        return map_tensors(partial(self._own, owned), tree)

    def entered(self, tree: Tree, nodes: InputNodes, *, owned: bool) -> Tree:
        """Return the tree in memory of the stage; tensors that require a gradient have entered the graph as `nodes`.

        Args:
            tree: The input of a microbatch.
            nodes: The microbatch's input nodes.
            owned: True if the stage may write to the memory of `tree`; otherwise it is copied.
        """
        return map_tensors(partial(self._enter, nodes, owned), tree)

    def _enter(self, nodes: InputNodes, owned: bool, tensor: torch.Tensor) -> torch.Tensor:
        return nodes.enter(self._own(owned, tensor)) if tensor.requires_grad else self._own(owned, tensor)

    def _own(self, owned: bool, tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor.detach()
        here = self._here(mine)
        return here if owned or here is not mine else copied(here)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == self.device else tensor.to(self.device)


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that layers on `device` draw from: torch's default ones of the CPU and of the device."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call]  # fills default_generators
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


@contextmanager
def generators_kept(*devices: torch.device) -> Iterator[None]:
    """Return a context in which the default generators of the CPU and of `devices` may be seeded and drawn from.

    At its end, also after an exception, they are in the state that they had.
    """
    kept = [(each, each.get_state()) for each in {own for device in devices for own in default_generators(device)}]
    try:
        yield
    finally:
        for generator, state in kept:
            generator.set_state(state)


class SeededLayers:
    """The layers of a stage in their order, which draw from generators that are seeded before each of them.

    Attributes:
        at: Name of the layer that ran last, or of another part of the stage, to name it if it hangs or fails.
        given: Values that this part was given, in words, if it has failed; else "".
    """

    def __init__(
        self, layers: Sequence[Layer], names: Sequence[str], *, first_layer: int, seed: int, device: torch.device
    ) -> None:
        """Take the layers.

        Args:
            layers: Functions that compute the layers: the modules, or functions that call them.
            names: Names of the layers.
            first_layer: Number of the first one in the unsplit model. Each layer is seeded by its own number.
            seed: Seed of the run.
            device: Device on which they draw, besides the CPU: from torch's default generators.
        """
        self._layers = [(first_layer + place, *each) for place, each in enumerate(zip(names, layers, strict=True))]
        self._told = self._layers
        self._seed = seed
        self._names = frozenset(names)
        self._generators = default_generators(device)
        self.at, self.given = next(iter(names), LOSS), ""

    def __str__(self) -> str:
        """Return the part of the stage that ran last: "layer 3", "the loss"."""
        return f"layer {self.at}" if self.at in self._names else self.at

    def note(self, what: str, given: str = "") -> None:
        """Note the part of the stage that runs now, such as "the optimizer"; if it has failed, what it was `given`."""
        self.at, self.given = what, given

    def run(self, x: Tree, passage: Passage, *, again: bool = False) -> Tree:
        """Return the output of the last layer for a microbatch of which the first layer gets `x`.

        Args:
            x: Input of the first layer.
            passage: The microbatch's.
            again: True if the layers have run for this microbatch before: no tap is told once more.
        """
        self.given = ""
        for number, name, layer in self._layers if again else self._told:
            self.at = name
            seed = layer_seed(self._seed, *passage.key, number)
            for generator in self._generators:
                generator.manual_seed(seed)
            try:
                x = layer(x)
            except Exception:
                self.note(name, describe_values(x))
                raise
        return x

    @contextmanager
    def tapped(self, tap: Tap) -> Iterator[None]:
        """Return a context in which `tap` gets each layer's name and output, before the next layer may write to it."""
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
    """Return the seed of the generators before a layer. It does not depend on the cut.

    Args:
        seed: Seed of the run.
        step: Step of the microbatch.
        microbatch: Number of the microbatch in the step.
        layer: Number of the layer in the unsplit model.
    """
    return int.from_bytes(sha256(f"{seed}/{step}/{microbatch}/{layer}".encode()).digest()[:8], "little")
