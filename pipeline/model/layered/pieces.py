"""Split of a traced forward before the calls of its layers: into pieces, each a function of what travels to it.

    forward    x -> [conv1] -> a -> [layer1] -> b, m -> [layer2] -> c -> [fc] -> y       fc needs m, too
    travels    x            a               b, m             m, c

torch.fx splits the graph; what a part of it needs of parts before the last one travels along. A stage refuses to send
two tensors in one memory (`pipeline/stage/layers/memory.py`), such as a tensor and a view of it. While torch.export
traces, each of its stand-ins for a tensor has a stand-in for its memory, too, which views share.
"""

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from stageline.pipeline.code_lines import CodeLine, users_line

from .export import Forward
from .traced_layer import TracedPiece
from .views import derive_views, memory_of

Value = TypeVar("Value")


_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')


def outer_calls(forward: Forward) -> list[str]:
    """Return the names of the calls of modules, in order, but for those in torch.no_grad, torch.vmap and their like."""
    return [name for _, name, outer in _calls(forward) if outer]


def pieces_of(forward: Forward, names: Sequence[str]) -> list[TracedPiece]:
    """Return the pieces of the layers called `names`, in that order. Takes the markers out of the graph."""
    numbers = _numbers(forward, {name: number for number, name in enumerate(names)})
    _remove_markers(forward.graph)
    derive_views(forward, numbers, len(names) - 1)
    split = split_module(
        forward.graph, forward.graph, numbers.__getitem__, keep_original_order=True, keep_original_node_name=True
    )
    returned: Any = split.graph.output_node().args[0]
    ends = [node.name for node in returned]
    parts = {int(str(part.target).rpartition("_")[2]): part for part in split.graph.nodes if part.op == "call_module"}
    pieces = [_piece(split, parts.get(number)) for number in range(len(names))]
    travels = travelling([(piece.arguments, piece.computed) for piece in pieces], forward.inputs, ends)
    nodes = {node.name: node for node in forward.graph.graph.nodes if node.op == "placeholder"}
    nodes |= {name: node for piece in pieces for name, node in _computed(piece)}
    return [
        replace(
            piece,
            received=travels[number],
            results=travels[number + 1],
            state=_needed(forward.state, piece, travels[number + 1]),
            constants=_needed(forward.constants, piece, travels[number + 1]),
            no_cut=_refusal(names[number], one_memory([nodes[name] for name in travels[number]])),
        )
        for number, piece in enumerate(pieces)
    ]


def travelling(
    pieces: Sequence[tuple[Sequence[str], Sequence[str]]], given: Sequence[str], ends: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return the values that each piece receives, and at the end those that the last one gives.

    Args:
        pieces: Arguments and computed values of each piece, in order.
        given: Values that the first piece receives.
        ends: Values that the last piece gives.
    """
    found, there = [tuple(given)], list(given)
    for number, (_, computed) in enumerate(pieces[:-1], 1):
        there += computed
        needed = {*ends, *(name for arguments, _ in pieces[number:] for name in arguments)}
        found.append(tuple(name for name in there if name in needed))
    return [*found, tuple(ends)]


def _computed(piece: TracedPiece) -> Iterator[tuple[str, Node]]:
    """Yield the values that the piece computes, by name, each with its node."""
    if piece.graph is not None and piece.computed:
        given: Any = piece.graph.graph.output_node().args[0]
        yield from zip(piece.computed, (given,) if isinstance(given, Node) else given, strict=True)


def _refusal(layer: str, twice: str) -> str:
    """Return why no stage can begin with `layer`, if `twice` names two tensors in one memory; "" if it names none."""
    if not twice:
        return ""
    return (
        f"no stage can begin with {layer}: two tensors that would cross the cut are in one memory, those of {twice}. "
        f"Cut elsewhere, or let the forward use a clone() of one of them"
    )


def _needed(table: Mapping[str, Value], piece: TracedPiece, results: Sequence[str]) -> dict[str, Value]:
    return {name: value for name, value in table.items() if name in piece.arguments or name in results}


def _numbers(forward: Forward, places: Mapping[str, int]) -> dict[Node, int]:
    """Return the number of the layer that computes each node: the last one called before it, or the first."""
    found, here, calls = {}, 0, list(_calls(forward))
    for node in forward.graph.graph.nodes:
        while calls and calls[0][0] is node:
            here = places.get(calls.pop(0)[1], here)
        found[node] = here
    return found


def _calls(forward: Forward) -> Iterator[tuple[Node, str, bool]]:
    """Yield each call of a module: the node that has it, the call's name, and True if a cut may be there.

    No cut may be in an inner graph, of which the node is not the marker, or in `torch.vmap` and its like.
    """
    names, nested = iter(forward.calls), 0
    for node in forward.graph.graph.nodes:
        nested += _nesting(node)
        for marker in _markers(forward.graph, node):
            yield node, next(names), marker is node and nested == 0


def _nesting(node: Node) -> int:
    """Return 1 for a node that begins a transform of torch.func, such as `vmap`, -1 for one that ends it, or else 0."""
    name = str(getattr(node.target, "__name__", ""))
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def _markers(graph: GraphModule, node: Node) -> Iterator[Node]:
    if _is_marker(node):
        yield node
    for inner in _inner_graphs(graph, node):
        for each in inner.graph.nodes:
            yield from _markers(inner, each)


def _inner_graphs(graph: GraphModule, node: Node) -> Iterator[GraphModule]:
    """Yield the graphs that `node` runs."""
    for given in node.all_input_nodes:
        inner = getattr(graph, str(given.target), None) if given.op == "get_attr" else None
        if isinstance(inner, GraphModule):
            yield inner


def _is_marker(node: Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.pippy._pipe_split.default


def _remove_markers(graph: GraphModule) -> None:
    for part in graph.modules():
        if isinstance(part, GraphModule):
            for node in filter(_is_marker, list(part.graph.nodes)):
                part.graph.erase_node(node)
            part.recompile()


def _piece(split: GraphModule, part: Node | None) -> TracedPiece:
    """Return the piece of a part of the split graph, without what travels, which is not known yet.

    There is no part where nothing is computed.
    """
    if part is None:
        return TracedPiece(None, (), ())
    taken: dict[Any, str] = {user.args[1]: user.name for user in part.users if user.target is operator.getitem}
    computed = tuple(taken[place] for place in sorted(taken)) if taken else (part.name,) if part.users else ()
    graph: Any = split.get_submodule(str(part.target))
    return TracedPiece(graph, tuple(given.name for given in part.all_input_nodes), computed)


def one_memory(nodes: Sequence[Node]) -> str:
    """Return, as text, the first two of `nodes` with tensors that begin at one address; "" if there are none."""
    seen: dict[tuple[int, str], Node] = {}
    for node in nodes:
        for place in memory_of(node):
            if (first := seen.setdefault(place, node)) is not node:
                return f"{_shown(first)} and {_shown(node)}"
    return ""


def _shown(node: Node) -> str:
    """Return the operator of `node`, and the user's line.

    An example is `view.default in forward (/home/anna/net/model.py, line 12)`.
    """
    name = f"the input {node.name}" if node.op == "placeholder" else str(getattr(node.target, "__name__", node.target))
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    line = users_line(CodeLine(file, int(number), function) for file, number, function in reversed(frames))
    return f"{name} in {line}" if line else name
