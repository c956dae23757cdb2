"""Views of tensors, derived again in the layers that use them, so that a tensor and a view of it need not cross a cut.

    x = first(...)                        x = first(...)
    m = x.view(-1, 1, 8)         ->
    ---- cut: x and m ----                ---- cut: x ----
                                          m = x.view(-1, 1, 8)
    y = second(m) + x                     y = second(m) + x

A view without a gradient is derived in each such layer. A view with one is derived once, later than in the forward, if
autograd adds up the gradients in the same order then: nothing else uses the tensor between the two places.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from .export import Forward

Numbers = dict[Node, int]


def derive_views(forward: Forward, numbers: Numbers, last: int) -> None:
    """Change the graph of `forward` so that fewer cuts are crossed by two tensors in one memory.

    Args:
        forward: The forward.
        numbers: Number of the layer that computes each node; gets those of new nodes, and the last one for the output.
        last: Number of the last layer.
    """
    graph = forward.graph.graph
    numbers[graph.output_node()] = last
    trained, written = _trained(forward), _written(graph)
    together: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if node.name not in forward.state and _last_use(node, numbers) > numbers[node]:
            for place in memory_of(node):
                together.setdefault(place, []).append(node)
    for (memory, _), crossing in together.items():
        base = _common_source(crossing) if len(crossing) > 1 and memory not in written else None
        if base is not None and base.name not in forward.state:
            _Views(graph, numbers, base, [each for each in crossing if each is not base]).derive(trained)


def memory_of(node: Node) -> Iterator[tuple[int, str]]:
    """Yield the memory and the offset at which each tensor of the node begins.

    An offset may be a formula of the number of rows.
    """
    found = node.meta.get("val")
    for value in found if isinstance(found, tuple | list) else (found,):
        if isinstance(value, torch.Tensor) and torch._C._has_storage(value):
            yield value.untyped_storage()._cdata, str(value.storage_offset())


@dataclass(frozen=True, slots=True)
class _Views:
    """Views of one tensor, all of which cross cuts.

    Attributes:
        graph: The graph.
        numbers: Number of the layer that computes each node.
        base: The tensor.
        views: The views, in the graph's order.
        copies: Nodes that derive views again, by the view and the layer.
    """

    graph: Graph
    numbers: Numbers
    base: Node
    views: Sequence[Node]
    copies: dict[tuple[Node, int], Node] = field(default_factory=dict)

    def derive(self, trained: set[Node]) -> None:
        """Let layers derive the views, as far as that keeps the bits. Those in `trained` have gradients."""
        until = self._until()
        for view in reversed(self.views):
            places = {user: min(self.numbers[user], until) for user in view.users}
            later = {user: place for user, place in places.items() if place > self.numbers[view]}
            if view in trained and not (later == places and self._keeps_order(view, set(later.values()), trained)):
                continue
            for user, place in later.items():
                user.replace_input_with(view, self._derived(view, place))
            _erase_unused(self.graph, view)

    def _until(self) -> int:
        """Return the last layer that the tensor itself travels to: after it, at most one of the views does."""
        until = max(_last_use(self.base, self.numbers), self.numbers[self.base])
        spans = [(self.numbers[view], _last_use(view, self.numbers)) for view in self.views]
        return max([until, *(min(one[1], other[1]) for one in spans for other in spans if one is not other)])

    def _keeps_order(self, view: Node, places: set[int], trained: set[Node]) -> bool:
        """Return True if nothing with a gradient uses the tensor between a view and the one layer that derives it."""
        if len(places) != 1:
            return False
        path = list(_path(view, self.base))
        between = list(self.graph.nodes)
        between = between[between.index(path[-1]) + 1 :]
        here = [node for node in between if self.numbers[node] < min(places)]
        return all(len(node.users) == 1 for node in path[1:]) and not any(
            self.base in node.all_input_nodes and node in trained for node in here
        )

    def _derived(self, view: Node, place: int) -> Node:
        """Return the node that derives `view` in the layer numbered `place`."""
        if view is self.base:
            return view
        if (found := self.copies.get((view, place))) is None:
            source: Any = view.args[0]
            given = self._derived(source, place)
            with self._at(given, place):
                found = self.graph.node_copy(view, lambda node: given if node is source else node)
            self.copies[view, place], self.numbers[found] = found, place
        return found

    def _at(self, given: Node, place: int) -> Any:
        if given in self.copies.values():
            return self.graph.inserting_after(given)
        nodes = self.graph.nodes
        first = next(node for node in nodes if node.op != "placeholder" and self.numbers[node] >= place)
        return self.graph.inserting_before(first)


def _source(node: Node) -> Node | None:
    """Return the tensor that `node` is a view of; None if it is none."""
    if node.target is operator.getitem:
        return _source(node.args[0]) if isinstance(node.args[0], Node) else None
    if not getattr(node.target, "is_view", False) or node.target is torch.ops.aten.as_strided.default:
        return None
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or {memory for memory, _ in memory_of(source)}.isdisjoint(
        memory for memory, _ in memory_of(node)
    ):
        return None
    return source


def _path(view: Node, base: Node) -> Iterator[Node]:
    """Yield `view` and the nodes between it and `base`, of which it is a view."""
    node: Any = view
    while node is not base:
        yield node
        node = node.args[0]


def _common_source(nodes: Sequence[Node]) -> Node | None:
    """Return the nearest tensor of which all `nodes` are views, which may be one of them; None if there is none."""
    lines = [list(_sources(node)) for node in nodes]
    return next((node for node in lines[0] if all(node in line for line in lines)), None)


def _sources(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = _source(node)


def _last_use(node: Node, numbers: Mapping[Node, int]) -> int:
    return max((numbers[user] for user in node.users), default=-1)


def _erase_unused(graph: Graph, node: Node) -> None:
    while not node.users and node.op != "placeholder" and (_source(node) or node.target is operator.getitem):
        source: Any = node.args[0]
        graph.erase_node(node)
        node = source


def _trained(forward: Forward) -> set[Node]:
    """Return the nodes that may have a gradient: those that depend on a parameter or on such an input."""
    inputs = dict(zip(forward.inputs, forward.example.tensors, strict=True))
    found: set[Node] = set()
    for node in forward.graph.graph.nodes:
        if node.op == "placeholder":
            needs = node.name in forward.state or (node.name in inputs and inputs[node.name].requires_grad)
        else:
            detached = node.target is torch.ops.aten.detach.default
            needs = not detached and any(each in found for each in node.all_input_nodes)
        if needs and _has_fractions(node):
            found.add(node)
    return found


def _has_fractions(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(not isinstance(each, torch.Tensor) or each.is_floating_point() or each.is_complex() for each in values)


def _written(graph: Graph) -> set[int]:
    """Return the memories that operators of the graph write to."""
    found: set[int] = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            found.update(memory for each in node.all_input_nodes for memory, _ in memory_of(each))
    return found
