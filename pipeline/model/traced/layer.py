"""A layer of a traced model: its two pieces, and the modules of the model that have their parameters and buffers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from stageline.pipeline.stage.layers.layer import BatchCheck, BoundLayer
from stageline.pipeline.tree import Tree

from ..families.layers import Layer
from .piece import TracedPiece, Values


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """A piece as the function of a layer. `places` have for each name of its state the number of a part of the layer
    and the rest of the name, which is "" for a tensor. What is given to the first layer is `taken` apart, and what the
    last one gives is `put` together. `check` is what the first layer has against a batch."""

    piece: TracedPiece
    places: Mapping[str, tuple[int, str]]
    taken: Callable[[Any], Values] = tuple
    put: Callable[[Values], Tree] = tuple
    check: BatchCheck = BoundLayer.check_inputs

    def __call__(self, x: Tree, *parts: Any) -> Tree:
        return self.put(self.piece.run(self.taken(x), lambda name: _tensor(parts, *self.places[name])))

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "TracedFunction":
        return replace(self, piece=self.piece.moved(move))


class TracedLayer(BoundLayer):
    """In training mode, the modules in it are in the modes that they were traced in; `eval()` takes the other graph."""

    calls_parts = False

    def __init__(
        self, training: TracedFunction, evaluation: TracedFunction, parts: Mapping[str, torch.nn.Module]
    ) -> None:
        super().__init__(training, parts)
        self._functions = {True: training, False: evaluation}
        self.check_inputs = training.check
        self.no_cut = training.piece.no_cut or evaluation.piece.no_cut

    def forward(self, x: Tree) -> Tree:
        return self._functions[self.training](x, *self.arguments())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "TracedLayer":
        """What `to(device)` calls: graphs name the device of what they make."""
        self._functions = {mode: function.moved(fn) for mode, function in self._functions.items()}
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]


class TwoModes(Layer):
    """A layer that computes by one function in training mode, and by another in evaluation mode."""

    def __init__(self, names: tuple[str, ...], training: TracedFunction, evaluation: TracedFunction) -> None:
        super().__init__(names, training)
        self._training, self._evaluation = training, evaluation

    def bind(self, parts: Mapping[str, torch.nn.Module]) -> TracedLayer:
        return TracedLayer(self._training, self._evaluation, parts)


def _tensor(parts: tuple[Any, ...], number: int, path: str) -> torch.Tensor:
    if not path:
        return parts[number]  # type: ignore[no-any-return]
    module, _, key = path.rpartition(".")
    return getattr(parts[number].get_submodule(module), key)  # type: ignore[no-any-return]
