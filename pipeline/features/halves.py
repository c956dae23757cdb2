"""A backward in two halves: first the gradients of the stage's inputs (I), later those of its weights (W).

    outputs --> border --> node --> border --> node --> inputs       I follows the edges that lead to the inputs
                  |                   |
               weights             weights                           W begins at the borders, and follows these edges

A border is a node of autograd's graph with an edge that leads to the inputs and another that leads to weights alone:
the product of a linear layer is one. I notes which gradients the borders get; W is one backward for each set of borders
that have weights in common, from those gradients. So every gradient is summed in the order of an undivided backward,
and has its bits. Where no input requires a gradient, I computes nothing, and W is the whole backward.

Between the two, all that the forward has saved below the last border stays in memory, and the gradients of the borders.
A weight that is used several times costs more: its W computes the gradients between its uses again.
Zero bubble pipelines, arXiv 2401.10241; torch.distributed.pipelining divides backwards likewise.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from stageline.pipeline.errors import StageError
from stageline.pipeline.stage.layers.passage import Key, Stashed
from stageline.pipeline.tree import tensors

Root = tuple[torch.Tensor | GradientEdge, torch.Tensor]  # where a backward begins, and the gradient there
_RootEdge = tuple[GradientEdge, torch.Tensor]
_Noted = dict[Node, tuple[torch.Tensor | None, ...]]  # the gradients of a node's outputs

_ADDS_UP = "torch::autograd::AccumulateGrad"
# torch 2.13 ends the process (a write to no memory) if this one computes gradients of weights alone, channels last.
_FRAGILE = "NativeGroupNormBackward0"
_REENTRANT = "CheckpointFunctionBackward"  # computes all gradients or none


@dataclass(slots=True)
class WeightPart:
    """The weights whose gradients one backward computes, and where that backward begins.

    Attributes:
        weights: Leaves that get a gradient.
        borders: Nodes at which the backward begins.
        roots: Outputs that depend on weights alone, with their gradients. The backward begins there, too.
    """

    weights: list[torch.Tensor] = field(default_factory=list)
    borders: list[Node] = field(default_factory=list)
    roots: list[Root] = field(default_factory=list)


class SplitBackward:
    """The backward of one microbatch on one stage, in two halves: `compute_inputs`, then `compute_weights`."""

    def __init__(
        self,
        stage: int,
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        anchor: torch.Tensor | None,
    ) -> None:
        """Look through autograd's graph for the parts of the second half; nothing is computed.

        Args:
            stage: Number of the stage, for errors.
            outputs: Outputs of the forward that require a gradient.
            gradients: Gradients with respect to `outputs`, in the same order.
            anchor: The leaf that all inputs which require a gradient lead to; None if no input requires one.

        Raises:
            StageError: A node of the graph cannot be divided.
        """
        self._noted: _Noted = {}
        roots = list(zip(map(get_gradient_edge, outputs), gradients, strict=True))
        if anchor is None:
            self._parts, self._inward = [WeightPart(roots=[*roots])], []
            return
        graph = _Graph(stage, (edge.node for edge, _ in roots), anchor)
        self._inward = [root for root in roots if graph.inward[root[0].node]]
        self._parts = graph.parts([root for root in roots if not graph.inward[root[0].node]])
        self._anchor = anchor

    def compute_inputs(self) -> None:
        """Run the first half (I): hand gradients to the inputs. No gradient is added to a weight."""
        roots, self._inward = self._inward, []
        if not roots:
            return
        borders = [border for part in self._parts for border in part.borders]
        handles = [border.register_prehook(_noting(self._noted, border)) for border in borders]
        try:
            _backward(roots, [self._anchor], retain_graph=bool(borders))
        finally:
            for handle in handles:
                handle.remove()

    def compute_weights(self, shared: Sequence[Root] = ()) -> None:
        """Run the second half (W): add the gradients of weights to their `.grad`.

        Args:
            shared: Shared weights with the gradients that a later stage, which uses them too, has sent. These are added
                before the stage's own.
        """
        left = list(shared)
        # Parts with several borders come first: they pass through the borders of others, whose graph they need.
        for part in sorted(self._parts, key=lambda part: len(part.borders), reverse=True):
            mine = [root for root in left if not part.weights or any(root[0] is each for each in part.weights)]
            left = [root for root in left if not any(root is each for each in mine)]
            self._run(part, mine)
        self._parts = []
        if left:
            _backward(left)

    def _run(self, part: WeightPart, shared: list[Root]) -> None:
        noted = {border: self._noted.pop(border) for border in part.borders if border in self._noted}
        edges = [
            (GradientEdge(border, place), gradient)
            for border, gradients in noted.items()
            for place, gradient in enumerate(gradients)
            if gradient is not None
        ]
        # A border that another one leads to is given its gradient twice, and takes what it was given in I; so does one
        # whose output has a hook, which has changed the gradient in I.
        handles = [border.register_prehook(_as_noted(gradients)) for border, gradients in noted.items()]
        try:
            if roots := [*shared, *part.roots, *edges]:
                compute = _backward_and_inward if any(map(_is_fragile, part.borders)) else _backward
                compute(roots, part.weights, retain_graph=len(part.borders) > 1)
        finally:
            for handle in handles:
                handle.remove()


def halfway_bytes(stage: int, outputs: Sequence[torch.Tensor], anchor: torch.Tensor | None) -> int:
    """Return the bytes that a microbatch takes between its halves: the gradients that I leaves for W.

    What the forward has saved is not counted. Nothing is computed.

    Args:
        stage: Number of the stage, for errors.
        outputs: Outputs of the forward that require a gradient.
        anchor: The leaf that all inputs which require a gradient lead to; None if no input requires one.

    Raises:
        StageError: A node of autograd's graph cannot be divided.
    """
    if anchor is None:
        return sum(output.numel() * output.element_size() for output in outputs)
    edges = [get_gradient_edge(output) for output in outputs]
    graph = _Graph(stage, (edge.node for edge in edges), anchor)
    parts = graph.parts(
        [(edge, each) for edge, each in zip(edges, outputs, strict=True) if not graph.inward[edge.node]]
    )
    borders = {border for part in parts for border in part.borders}
    used = {(edge.node, edge.output_nr) for edge in edges}
    used |= {(below, place) for node in graph.inward for below, place in node.next_functions if below in borders}
    noted = sum(_gradient_bytes(node, place) for node, place in used if node in borders)
    return noted + sum(each.numel() * each.element_size() for part in parts for _, each in part.roots)


def _gradient_bytes(node: Node, place: int) -> int:
    """Return the bytes of the gradient of output number `place` of the forward of `node`."""
    given = node._input_metadata[place]
    shape: torch.Size = given.shape
    dtype: torch.dtype = given.dtype
    return math.prod(shape) * dtype.itemsize


class _Graph:
    """Autograd's graph behind some roots.

    `inward` maps each node to True if it leads to the inputs' anchor; a node stands after the nodes that it leads to.
    The constructor raises `StageError` for a node that cannot be divided.
    """

    def __init__(self, stage: int, roots: Iterable[Node], anchor: torch.Tensor) -> None:
        self._below: dict[Node, list[Node]] = {}
        self.inward: dict[Node, bool] = {}
        stack = list(roots)
        while stack:
            node = stack[-1]
            if node not in self._below:
                self._below[node] = [each for each, _ in node.next_functions if each is not None]
                _require_divisible(stage, node)
            below = self._below[node]
            if missing := [each for each in below if each not in self.inward]:
                stack += missing
                continue
            self.inward[stack.pop()] = any(map(self.inward.__getitem__, below)) or _leaf(node) is anchor

    def parts(self, roots: list[_RootEdge]) -> list[WeightPart]:
        """Return the weights that I leaves out, with the borders or `roots` at which their backwards begin."""
        sets = _DisjointSets()
        for node, below in self._below.items():
            for outward in (each for each in below if not self.inward[each]):
                sets.join(node, outward)
        parts: dict[Node, WeightPart] = {}
        for node, inward in self.inward.items():
            if not inward or node in sets:
                part = parts.setdefault(sets.find(node), WeightPart())
                weight = _leaf(node)
                part.borders.extend([node] if inward else [])
                part.weights.extend([] if weight is None else [weight])
        for edge, gradient in roots:
            parts[sets.find(edge.node)].roots.append((edge, gradient))
        return [part for part in parts.values() if part.weights]


class _DisjointSets:
    """Disjoint sets of nodes (union-find)."""

    def __init__(self) -> None:
        self._above: dict[Node, Node] = {}

    def __contains__(self, node: Node) -> bool:
        return node in self._above

    def find(self, node: Node) -> Node:
        while (above := self._above.setdefault(node, node)) is not node:
            self._above[node] = self._above[above]  # shortens the way for the next time
            node = above
        return node

    def join(self, one: Node, other: Node) -> None:
        self._above[self.find(one)] = self.find(other)


def _backward(roots: Sequence[Root], inputs: Sequence[torch.Tensor] = (), *, retain_graph: bool = False) -> None:
    """Add the gradients of `inputs`, or of all leaves, to their `.grad`."""
    edges, gradients = zip(*roots, strict=True)
    torch.autograd.backward(edges, gradients, inputs=inputs or None, retain_graph=retain_graph)


def _backward_and_inward(roots: Sequence[Root], inputs: Sequence[torch.Tensor], *, retain_graph: bool) -> None:
    """Add the gradients of `inputs` to their `.grad`; fragile nodes compute the gradients of their inputs, too.

    Those gradients are dropped. They are computed since torch ends the process where a fragile node computes gradients
    of weights alone.
    """
    edges, gradients = zip(*roots, strict=True)
    fragile = [edge.node for edge in edges if isinstance(edge, GradientEdge) and _is_fragile(edge.node)]
    inward = [GradientEdge(below, place) for node in fragile for below, place in node.next_functions if below]
    ends = [*map(get_gradient_edge, inputs), *inward]
    found = torch.autograd.grad(edges, ends, gradients, retain_graph=retain_graph, allow_unused=True)
    computed = zip(inputs, found[: len(inputs)], strict=True)
    if given := [(weight, gradient) for weight, gradient in computed if gradient is not None]:
        _backward(given)


def _is_fragile(node: Node) -> bool:
    return node.name() == _FRAGILE


def _leaf(node: Node) -> torch.Tensor | None:
    """Return the leaf whose gradient `node` adds up; None for a node that does something else."""
    return node.variable if node.name() == _ADDS_UP else None  # type: ignore[attr-defined]


def _noting(noted: _Noted, border: Node) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
    def note(gradients: tuple[torch.Tensor | None, ...]) -> None:
        noted[border] = gradients

    return note


def _as_noted(
    gradients: tuple[torch.Tensor | None, ...],
) -> Callable[[object], tuple[torch.Tensor | None, ...]]:
    return lambda _: gradients


def _require_divisible(stage: int, node: Node) -> None:
    if node.name() == _REENTRANT:
        raise StageError(
            f"stage {stage} cannot compute the gradients of its inputs before those of its weights: a layer calls "
            f"torch.utils.checkpoint.checkpoint with use_reentrant=True. Call it with use_reentrant=False, or use a "
            f"schedule that does not split backwards, such as 1f1b"
        )


class WaitingHalves:
    """The microbatches of one stage that have run the first half of a backward and wait for the second.

    Attributes:
        kept: The waiting backwards by step and microbatch, the oldest first.
    """

    def __init__(self, stage: int, indivisible: str) -> None:
        """Begin with none.

        Args:
            stage: Number of the stage, for errors.
            indivisible: Reason why the stage cannot halve a backward; "" if it can.
        """
        self._stage = stage
        self._indivisible = indivisible
        self.kept: dict[Key, SplitBackward] = {}

    def demand(self) -> None:
        """Raise `StageError` if a feature of the stage cannot be combined with halves of backwards."""
        if self._indivisible:
            raise StageError(f"stage {self._stage} {self._indivisible}")

    def run_first(
        self, key: Key, stashed: Stashed, outputs: list[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Run the first half for one microbatch: hand gradients to its inputs.

        Args:
            key: Step and microbatch.
            stashed: The microbatch's forward. Its `outputs` become None, so that the graph alone holds them.
            outputs: Outputs that take part in the backward. The list is emptied for the same reason.
            gradients: Gradients with respect to `outputs`, in the same order.

        Raises:
            StageError: A layer cannot be divided.
        """
        half = SplitBackward(self._stage, outputs, gradients, stashed.input_nodes.anchor)
        stashed.drop_outputs()
        outputs.clear()
        half.compute_inputs()
        self.kept[key] = half

    def run_second(self, step: int | None, microbatch: int | None, shared: Sequence[Root]) -> None:
        """Run the second half for one microbatch: add the gradients of weights to their `.grad`.

        Args:
            step: Step of the microbatch. If this or `microbatch` is None, the oldest waiting one is taken.
            microbatch: Number of the microbatch within the step.
            shared: Shared weights with gradients from a later stage, which are added first. These alone are added for a
                microbatch whose first half had nothing to run, since nothing required a gradient.
        """
        oldest = next(iter(self.kept), (0, 0))
        key = oldest if step is None or microbatch is None else (step, microbatch)
        half = self.kept.pop(key, None)
        if half is None:
            half = SplitBackward(self._stage, (), (), None)
        half.compute_weights(shared)

    def bytes_after(self, stashed: Stashed | None) -> int | None:
        """Return the bytes that `stashed` would take between the halves, besides what its forward has saved.

        Returns 0 if `stashed` is None, and None if its backward cannot be divided.
        """
        if self._indivisible:
            return None
        if stashed is None:
            return 0
        outputs = [output for output in tensors(stashed.outputs) if output.requires_grad]
        try:
            return halfway_bytes(self._stage, outputs, stashed.input_nodes.anchor)
        except StageError:
            return None
