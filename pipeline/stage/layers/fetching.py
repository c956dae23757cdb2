"""Which weights are read from files ahead of their use: those of the next layer that has any, while one computes.

forward    layer 0     dropout     layer 2     layer 3
fetched    0, 2                    3
backward   layer 3                 layer 2     layer 0
fetched    3, 2                    0                       with the gradients that there are: more is added to them
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch

from .file_memory import FileMemory


class LayersAhead:
    """Those of one stage, of which `layers` are the layers in their order."""

    def __init__(self, layers: Sequence[torch.nn.Module], memory: FileMemory) -> None:
        self._memory = memory
        places = [place for place, layer in enumerate(layers) if any(True for _ in layer.parameters())]
        self._weights = {place: [*layers[place].parameters()] for place in places}
        self._wanted = {place: [following] for place, following in pairwise(places)}
        self._wanted |= dict.fromkeys(places[:1], places[:2])
        self._backward = _from_first_trained(list(self._weights.values()))
        for two_before, weights in zip(self._backward, self._backward[2:], strict=False):
            for trained in [each for each in weights if each.requires_grad][:1]:
                trained.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, weights=two_before: memory.fetch(_with_gradients(weights))
                )

    def before_forward(self, place: int) -> None:
        """The layer at `place` is about to run forward."""
        for wanted in self._wanted.get(place, ()):
            self._memory.fetch(self._weights[wanted])

    def before_backward(self) -> None:
        """The stage is about to run backward."""
        for weights in reversed(self._backward[-2:]):
            self._memory.fetch(_with_gradients(weights))


def _from_first_trained(layers: Sequence[Sequence[torch.nn.Parameter]]) -> Sequence[Sequence[torch.nn.Parameter]]:
    """Backward uses no weights of the layers before."""
    trained = [number for number, weights in enumerate(layers) if any(each.requires_grad for each in weights)]
    return layers[trained[0] :] if trained else []


def _with_gradients(weights: Iterable[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    for parameter in weights:
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
