"""Part of a traced forward, as a function of what travels to it and of the model's parameters and buffers."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

Values = tuple[Any, ...]  # tensors, numbers, and lists of tensors


@dataclass(frozen=True, slots=True)
class TracedPiece:
    """What one layer computes in one mode. All values go by names.

    `graph` takes `arguments` of what is `received`, of `state` (with the names that it has in the model) and of
    `constants`, and gives what is `computed`. The `results` travel on. Without a graph nothing is computed.
    `no_cut` is the reason why what is received cannot be sent, "" if it can.
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
        """The results, from what is received. `tensor` gives the parameter or buffer of a name in the model."""
        values = dict(zip(self.received, given, strict=True))
        values.update(self.constants)
        for value, name in self.state.items():
            values[value] = tensor(name)
        if self.graph is not None:
            computed = self.graph(*[values[name] for name in self.arguments])
            values.update(zip(self.computed, (computed,) if len(self.computed) == 1 else computed, strict=True))
        return tuple([values[name] for name in self.results])

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "TracedPiece":
        """The same, on the device that `move` moves tensors to."""
        graph = None if self.graph is None else _on_device(self.graph, move(torch.empty(0)).device)
        return replace(self, graph=graph, constants={name: move(each) for name, each in self.constants.items()})


def _on_device(graph: GraphModule, device: torch.device) -> GraphModule:
    """`graph`, with `device` in the place of every device that it names, which it was traced on."""
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
