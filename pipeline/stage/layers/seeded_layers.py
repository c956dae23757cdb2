"""Runs the layers of a stage, with the random generators seeded before each: its numbers depend on nothing else.
`Activity` names the layer that ran last, for people who ask why a worker waits, or which layer failed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256

import torch

from stageline.pipeline.tree import Tree

from .stash import Key

LOSS, OPTIMIZER, LR_SCHEDULER = "the loss", "the optimizer", "the learning rate scheduler"  # in place of a layer's name
GRADIENTS = "the gradients"  # likewise
Tap = Callable[[str, Tree], object]  # of a layer's name and what it returned, neither of which it may change


class Activity:
    """`at` is the name of the layer that ran last, or what else of a stage with these `layers` did."""

    __slots__ = ("_layers", "at")

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = frozenset(layers)
        self.at = next(iter(layers), LOSS)

    def __str__(self) -> str:
        """ "layer 3", "the loss"."""
        return f"layer {self.at}" if self.at in self._layers else self.at


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
    """`layers` in their order, by their `names`; the first is number `first_layer` of the unsplit model's. They draw
    from torch's default generators, which `run` seeds from `seed`, step, microbatch and the layer's number."""

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        names: Sequence[str],
        *,
        first_layer: int,
        seed: int,
        device: torch.device,
        activity: Activity,
    ) -> None:
        self._layers = [(first_layer + place, *each) for place, each in enumerate(zip(names, layers, strict=True))]
        self._seed = seed
        self._generators = default_generators(device)
        self._activity = activity
        self.before: Callable[[int], object] | None = None  # is given the place of each layer before that runs
        self.tap: Tap | None = None  # is given what each layer returns, before the next layer may write to it

    def run(self, x: Tree, key: Key, *, taps: bool = True) -> Tree:
        """What the last layer returns for microbatch `key`, of which the first gets `x`. Raises what a layer raises."""
        tap = self.tap if taps else None
        for place, (number, name, layer) in enumerate(self._layers):
            self._activity.at = name
            if self.before is not None:
                self.before(place)
            seed = layer_seed(self._seed, *key, number)
            for generator in self._generators:
                generator.manual_seed(seed)
            x = layer(x)
            if tap is not None:
                tap(name, x)
        return x


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """The seed of the generators before `layer`, numbered in the unsplit model: it does not depend on the cut."""
    return int.from_bytes(sha256(f"{seed}/{step}/{microbatch}/{layer}".encode()).digest()[:8], "little")
