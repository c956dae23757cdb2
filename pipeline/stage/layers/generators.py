"""torch's default random generators: those that layers draw from, and a user's script too."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
