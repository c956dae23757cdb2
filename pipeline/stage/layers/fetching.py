"""Which weights are read from files ahead of their use: those of the layer that computes after the one that does now.

forward    layer 0     layer 1     layer 2
fetched    1           2           0          the next microbatch begins with it
backward   layer 2     layer 1     layer 0
fetched                0                      once the gradients of layer 2 are there; layer 1 has just been used
"""

from collections.abc import Iterator, Sequence

import torch

from .file_memory import FileMemory


class LayersAhead:
    """Those of one stage, of which `layers` are the layers in their order."""

    def __init__(self, layers: Sequence[torch.nn.Module], memory: FileMemory) -> None:
        self._layers = layers
        self._memory = memory
        for place, layer in enumerate(layers[2:]):
            trained = next((each for each in layer.parameters() if each.requires_grad), None)
            if trained is not None:
                trained.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, place=place: self._fetch(place)
                )

    def before(self, place: int) -> None:
        """The layer at `place` is about to run forward."""
        self._fetch((place + 1) % len(self._layers))

    def _fetch(self, place: int) -> None:
        self._memory.fetch(_with_gradients(self._layers[place]))


def _with_gradients(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    for parameter in layer.parameters():
        yield parameter
        if parameter.grad is not None:  # a later microbatch's is added to it
            yield parameter.grad
