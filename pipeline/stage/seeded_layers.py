"""Runs the layers of a stage, with the random generators seeded before each: its numbers depend on nothing else."""

from collections.abc import Callable, Sequence
from hashlib import sha256

import torch

from stageline.pipeline.stage.backward.stash import Key
from stageline.pipeline.tree import Tree

from .layers.activity import Activity, default_generators

Tap = Callable[[str, Tree], object]  # of a layer's name and what it returned, neither of which it may change


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
