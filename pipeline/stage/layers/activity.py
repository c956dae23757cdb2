"""What a stage does, or did last: for people who ask why a worker waits, or which layer failed.

torch's default random generators: those that layers draw from, and a user's script too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

LOSS, OPTIMIZER, LR_SCHEDULER = "the loss", "the optimizer", "the learning rate scheduler"  # in place of a layer's name
GRADIENTS = "the gradients"  # likewise


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
