"""Runs the layers of a stage, with the random generators seeded before each: its numbers depend on nothing else.
They know which ran last, for people who ask why a worker waits, or which layer failed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from typing import Any

import torch

from stageline.pipeline.tree import Tree

from .stash import Passage

LOSS, OPTIMIZER, LR_SCHEDULER = "the loss", "the optimizer", "the learning rate scheduler"  # in place of a layer's name
GRADIENTS = "the gradients"  # likewise
Layer = Callable[[Any], Any]
Tap = Callable[[str, Tree], object]  # of a layer's name and what it returned, neither of which it may change


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
