"""Layers of a traced model: two pieces each, and the modules of the model that have their parameters and buffers.

A piece is part of a traced forward, as a function of what travels to it and of the model's parameters and buffers.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from stageline.pipeline.model.layered.layers import Layer
from stageline.pipeline.stage.layers.layer import BatchCheck, BoundLayer
from stageline.pipeline.tree import Tree

Values = tuple[Any, ...]  # tensors, numbers, and lists of tensors


@dataclass(frozen=True, slots=True)
class TracedPiece:
    """The computation of one layer in one mode. All values go by names.

    Attributes:
        graph: Computes the layer; None if nothing is computed.
        arguments: Arguments of the graph, from `received`, `state` and `constants`.
        computed: Values that the graph returns.
        received: Values that travel to the layer.
        results: Values that travel on.
        state: Parameters and buffers, with their names in the model.
        constants: Constants, with their tensors.
        no_cut: Reason why the received values cannot be sent between stages; "" if they can.
    """

    graph: GraphModule | None
    arguments: tuple[str, ...]
    computed: tuple[str, ...]
    received: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    state: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    no_cut: str = ""

    def run(self, given: Values, tensor: Callable[[str], torch.Tensor]) -> Values:
        """Return the results.

        Args:
            given: The received values, in order.
            tensor: Returns the parameter or buffer of a name in the model.
        """
        values = dict(zip(self.received, given, strict=True))
        values.update(self.constants)
        for value, name in self.state.items():
            values[value] = tensor(name)
        if self.graph is not None:
            computed = self.graph(*[values[name] for name in self.arguments])
            values.update(zip(self.computed, (computed,) if len(self.computed) == 1 else computed, strict=True))
        return tuple([values[name] for name in self.results])

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "TracedPiece":
        """Return the piece on the device that `move` moves tensors to."""
        graph = None if self.graph is None else _on_device(self.graph, move(torch.empty(0)).device)
        return replace(self, graph=graph, constants={name: move(each) for name, each in self.constants.items()})


def _on_device(graph: GraphModule, device: torch.device) -> GraphModule:
    """Return `graph` with `device` in the place of every device that it names: those that it was traced on."""
    if all(each == device for each in _devices(graph)):
        return graph
    made = deepcopy(graph)
    for part in _graphs(made):
        for node in part.graph.nodes:
            node.args = _with_device(node.args, device)
            node.kwargs = _with_device(node.kwargs, device)
        part.recompile()
    return made


def _devices(graph: GraphModule) -> set[torch.device]:
    found: set[torch.device] = set()
    for part in _graphs(graph):
        for node in part.graph.nodes:
            map_aggregate(
                (node.args, node.kwargs), lambda leaf: found.add(leaf) if isinstance(leaf, torch.device) else leaf
            )
    return found


def _with_device(arguments: Any, device: torch.device) -> Any:
    return map_aggregate(arguments, lambda leaf: device if isinstance(leaf, torch.device) else leaf)


def _graphs(graph: GraphModule) -> Iterator[GraphModule]:
    return (part for part in graph.modules() if isinstance(part, GraphModule))


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """A piece as the function of a layer.

    Attributes:
        piece: The piece.
        places: For each name of the piece's state, the number of a part of the layer and the rest of the name, "" for a
            tensor.
        taken: Takes the layer's input apart; only the first layer has another than `tuple`.
        put: Puts the layer's output together; only the last layer has another than `tuple`.
        check: Raises an error for a batch that the first layer cannot take.
    """

    piece: TracedPiece
    places: Mapping[str, tuple[int, str]]
    taken: Callable[[Any], Values] = tuple
    put: Callable[[Values], Tree] = tuple
    check: BatchCheck = BoundLayer.check_inputs

    def __call__(self, x: Tree, *parts: Any) -> Tree:
        """Return the layer's output for the input `x`, with the layer's `parts`."""
        return self.put(self.piece.run(self.taken(x), lambda name: _tensor(parts, *self.places[name])))

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "TracedFunction":
        """Return the function on the device that `move` moves tensors to."""
        return replace(self, piece=self.piece.moved(move))


class TracedLayer(BoundLayer):
    """A layer that computes with one graph in training mode and with another after `eval()`.

    In training mode, the modules in it are in the modes that they were traced in.
    """

    calls_parts = False

    def __init__(
        self, training: TracedFunction, evaluation: TracedFunction, parts: Mapping[str, torch.nn.Module]
    ) -> None:
        """Make the layer.

        Args:
            training: The layer's function in training mode.
            evaluation: The layer's function in evaluation mode.
            parts: Parts of the model, by their names.
        """
        super().__init__(training, parts)
        self._functions = {True: training, False: evaluation}
        self.check_inputs = training.check
        self.no_cut = training.piece.no_cut or evaluation.piece.no_cut

    def forward(self, x: Tree) -> Tree:
        """Return the output for `x` in the present mode."""
        return self._functions[self.training](x, *self.arguments())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "TracedLayer":
        """Move the layer as `to(device)` does, with its graphs, which name the device of the tensors that they make."""
        self._functions = {mode: function.moved(fn) for mode, function in self._functions.items()}
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]


class TwoModes(Layer):
    """A layer that computes by one function in training mode, and by another in evaluation mode."""

    def __init__(self, name: str, names: tuple[str, ...], training: TracedFunction, evaluation: TracedFunction) -> None:
        """Make the layer.

        Args:
            name: Name of the layer: a call of a module.
            names: Names of the layer's parts.
            training: The layer's function in training mode.
            evaluation: The layer's function in evaluation mode.
        """
        super().__init__(names, training)
        self._name, self._training, self._evaluation = name, training, evaluation

    @property
    def name(self) -> str:
        """Name of the layer: a call of a module."""
        return self._name

    def bind(self, parts: Mapping[str, torch.nn.Module]) -> TracedLayer:
        """Return the module that computes the layer from `parts` of the model, given by their names."""
        return TracedLayer(self._training, self._evaluation, parts)


def _tensor(parts: tuple[Any, ...], number: int, path: str) -> torch.Tensor:
    if not path:
        return parts[number]  # type: ignore[no-any-return]
    module, _, key = path.rpartition(".")
    return getattr(parts[number].get_submodule(module), key)  # type: ignore[no-any-return]
