"""Recomputation: a forward keeps its input, and backward runs the forward again for what autograd needs.

    forward    x ─> layers ─> y      x stays, and the buffers as they were
    backward   x ─> layers again, with the seeds, weights and buffers of the forward; then gradients, as ever

By `torch.utils.checkpoint` without reentrant autograd (Chen et al., arXiv 1604.06174): the nodes of the graph are those
of the first forward, so gradients are added up in its order, and no bit changes.

`ForwardState` keeps the rest of what a forward computed with, and puts it in place when the forward runs again:

parameters   themselves: the leaves of a version where weights are stashed
buffers      as they were before the forward, which has changed the module's own already
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from stageline.pipeline.errors import StageError
from stageline.pipeline.model_names import matches
from stageline.pipeline.stage.layers.body import Body
from stageline.pipeline.stage.layers.layer import BoundLayer, HeldTensor, joined, parts_of
from stageline.pipeline.stage.layers.memory import copied
from stageline.pipeline.stage.layers.passage import InputNodes, Passage, Run
from stageline.pipeline.tree import Tree, map_tensors, tensors

Tensors = Mapping[str, torch.Tensor | None]
WHOLE, EACH = "stage", "layers"
# The stage as one, its layers one by one, or patterns of the names of layers and modules in them.
Recompute = Literal["stage", "layers"] | Sequence[str]
Forward = Callable[..., Any]


class BufferCopies:
    """Copies of buffers. Forwards between which a buffer has not changed share one copy.

    Copies are shared for buffers on the CPU only, where comparing waits for nothing.
    """

    def __init__(self) -> None:
        """Begin without copies."""
        self._newest: dict[tuple[int, str], torch.Tensor] = {}

    def of(self, modules: Sequence[torch.nn.Module]) -> list[Tensors]:
        """Return copies of the buffers of each module, without those of its submodules, by name.

        A buffer that several modules have is copied once.
        """
        copies: dict[int, torch.Tensor] = {}
        for module in modules:
            for key, each in module._buffers.items():
                if each is not None and id(each) not in copies:
                    copies[id(each)] = self._copy((id(module), key), each)
        return [
            {key: None if each is None else copies[id(each)] for key, each in module._buffers.items()}
            for module in modules
        ]

    def _copy(self, place: tuple[int, str], buffer: torch.Tensor) -> torch.Tensor:
        known = self._newest.get(place)
        if known is None or not _same(known, buffer):
            known = self._newest[place] = copied(buffer.detach())
        return known


class ForwardState:
    """The parameters and buffers that a forward of one module computed with."""

    def __init__(self, module: torch.nn.Module, name: str, copies: BufferCopies, *, demands_same: bool) -> None:
        """Keep the module's parameters, and copies of its buffers as they are now.

        Args:
            module: The module whose forward runs again later.
            name: Name of the module in errors.
            copies: Makes the copies of buffers.
            demands_same: True if the parameters must not be written to before the forward has run again.
        """
        self._name, self._demands_same = name, demands_same
        modules = [*module.modules()]
        self._parts = [
            (part, dict(part._parameters), buffers) for part, buffers in zip(modules, copies.of(modules), strict=True)
        ]
        self._written = self._writes()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context in which the module has the kept parameters, and copies of the kept buffers.

        Raises `StageError` if parameters were written to although they must stay the same.
        """
        if self._demands_same and self._writes() != self._written:
            raise StageError(
                f"weights of {self._name} have changed between a forward and its backward, which would run the forward "
                f"again with others: update once all microbatches have gone backward, or give the stage stash_weights"
            )
        own = [(part, dict(part._parameters), dict(part._buffers)) for part, *_ in self._parts]
        fresh = {id(each): copied(each) for *_, buffers in self._parts for each in buffers.values() if each is not None}
        try:
            for part, parameters, buffers in self._parts:
                _put(
                    part, parameters, {key: None if each is None else fresh[id(each)] for key, each in buffers.items()}
                )
            yield
        finally:
            for part, parameters, buffers in own:
                _put(part, parameters, buffers)

    def _writes(self) -> list[int]:
        """Return how often each parameter was written to."""
        return [each._version for _, parameters, _ in self._parts for each in parameters.values() if each is not None]


def _put(module: torch.nn.Module, parameters: Tensors, buffers: Tensors) -> None:
    """Give `module` these parameters and buffers, without torch's checks of kind.

    Torch would refuse the tensor that stands for a parameter in a version, since it is no `Parameter`.
    """
    for held, given in ((module._parameters, parameters), (module._buffers, buffers)):
        held.clear()
        held.update(given)  # type: ignore[arg-type]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return other.is_cpu and one.dtype == other.dtype and torch.equal(one, other)


def recomputation_of(body: Body, wanted: Recompute | None, *, versions: bool) -> "NoRecomputation":
    """Return the recomputation for the stage with this `body`.

    Args:
        body: The stage's layers.
        wanted: "stage", "layers", or patterns of the names of layers and modules; None if nothing runs again.
        versions: True if each forward has weights that no update writes to.

    Raises:
        StageError: `wanted` has another form.
    """
    if wanted is None:
        return NoRecomputation()
    if wanted not in (WHOLE, EACH) and not _are_patterns(wanted):
        raise StageError(f'recompute = {wanted!r}: expected "{WHOLE}", "{EACH}" or a list of patterns of names')
    modules = _modules(body, wanted)
    if wanted != WHOLE and not modules:
        return NoRecomputation()
    checkpoint(torch.neg, torch.zeros(()), use_reentrant=False)  # it imports torch's compiler, for a second or longer
    return Recomputation(body, modules, versions=versions)


class NoRecomputation:
    """The absence of recomputation: backward runs nothing again.

    Attributes:
        indivisible: Reason why a backward cannot be halved; "" if it can.
    """

    indivisible = ""  # why a backward cannot be halved

    def around(self, run: Run, again: Run) -> Run:
        """Return a function that computes as `run` does.

        A subclass has its backward call `again` for what it needs once more.
        """
        return run


class Recomputation(NoRecomputation):
    """The recomputation of a stage: of some of its modules, each by itself, or of the whole stage."""

    indivisible = (
        "recomputes what backward needs, and would do so for each half of a backward, and for each of its weights in "
        "the second: take recompute out, or use a schedule that does not split backwards, such as 1f1b"
    )

    def __init__(self, body: Body, modules: Mapping[str, torch.nn.Module], *, versions: bool) -> None:
        """Prepare for a stage.

        Args:
            body: The stage's layers.
            modules: The modules that run again, by name. If there are none, the whole stage runs again.
            versions: True if each forward has weights that no update writes to.
        """
        self._body = body
        self._modules = modules
        self._versions = versions
        self._copies = BufferCopies()

    def around(self, run: Run, again: Run) -> Run:
        """Return a function that computes as `run` does.

        Its backward runs the chosen modules, or for the whole stage `again`, once more.
        """
        return partial(self._run_modules, run) if self._modules else partial(self._run_whole, run, again)

    def _run_modules(self, run: Run, x: Tree, passage: Passage) -> Tree:
        with ExitStack() as stack:
            for name, module in self._modules.items():
                stack.enter_context(_with_forward(module, self._recomputed(module, name)))
            return run(x, passage)

    def _run_whole(self, run: Run, again: Run, x: Tree, passage: Passage) -> Tree:
        """Run the stage so that backward runs the whole of it again.

        Generators are seeded layer by layer, so their state need not be kept.
        """
        state = ForwardState(self._body, "the stage", self._copies, demands_same=not self._versions)
        kept = [copied(each.detach()).requires_grad_(each.requires_grad) for each in tensors(x)]  # x may be written to
        form = map_tensors(lambda each: each.new_empty(0), x)
        first = [x]

        def forward(*given: torch.Tensor) -> Tree:
            if first:
                return run(first.pop(), passage)
            found = iter(given)
            with state.in_place():
                return again(_entered(map_tensors(lambda _: next(found), form)), passage)

        return checkpoint(forward, *kept, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    def _recomputed(self, module: torch.nn.Module, name: str) -> Forward:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            state = ForwardState(module, name, self._copies, demands_same=True)
            given, form = tree_flatten((args, kwargs))  # side by side, so that it is autograd that keeps the tensors
            first = [(args, kwargs)]

            def run(*given: Any) -> Any:
                if first:
                    args, kwargs = first.pop()
                    return own(*args, **kwargs)
                args, kwargs = tree_unflatten(given, form)
                with state.in_place():
                    return own(*args, **kwargs)

            before = _writes(given)
            output = checkpoint(run, *given, use_reentrant=False)
            if _writes(given) != before:
                raise StageError(
                    f"{name} writes to what it is given, and would need it as it was to run again: do not recompute "
                    f'it by itself; with recompute = "{WHOLE}", the stage keeps a copy of its input'
                )
            return output

        return forward


def recomputable(names: Sequence[str], layers: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return the layers, and the modules in them that can be called, by their names in the unsplit model.

    Args:
        names: Names of the layers.
        layers: The layers, in the same order.
    """
    found: dict[str, torch.nn.Module] = {}
    for name, layer in zip(names, layers, strict=True):
        called = not isinstance(layer, BoundLayer) or layer.calls_parts
        for path, part in parts_of(layer, name) if called else ():
            if not isinstance(part, HeldTensor):
                called_alone = ((key, each) for key, each in part.named_modules() if _has_forward(each))
                found |= {joined(path, key) if key else path: each for key, each in called_alone}
        found[name] = layer
    return found


def _modules(body: Body, wanted: Recompute) -> dict[str, torch.nn.Module]:
    """Return the modules that run again by themselves, by name; none if the whole stage runs again."""
    if wanted == EACH:
        return dict(zip(body.names, body, strict=True))
    return {} if wanted == WHOLE else outermost(recomputable(body.names, list(body)), wanted)


def outermost(named: Mapping[str, torch.nn.Module], patterns: Sequence[str]) -> dict[str, torch.nn.Module]:
    """Return the modules whose names match one of `patterns`, without modules inside of others that match.

    An inner module runs again with the outer one.
    """
    chosen = {name: module for name, module in named.items() if matches(name, patterns)}
    inner = {id(each) for module in chosen.values() for each in module.modules() if each is not module}
    return {name: module for name, module in chosen.items() if id(module) not in inner}


def _are_patterns(wanted: object) -> bool:
    return (
        isinstance(wanted, Sequence) and not isinstance(wanted, str) and all(isinstance(each, str) for each in wanted)
    )


def _has_forward(module: torch.nn.Module) -> bool:
    """Return True if `module` can be called: False if it only holds others, as a ModuleList does."""
    return "forward" in module.__dict__ or type(module).forward is not torch.nn.Module.forward


@contextmanager
def _with_forward(module: torch.nn.Module, forward: Forward) -> Iterator[None]:
    """Return a context in which a call of `module` calls `forward`.

    Hooks of the module run once, outside of `forward`.
    """
    own = module.__dict__.get("forward")  # a user may have given it one, too
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


def _entered(x: Tree) -> Tree:
    """Return `x` with its tensors as nodes of a graph, as in the first forward."""
    nodes = InputNodes(x)
    return map_tensors(lambda each: nodes.enter(each.detach()) if each.requires_grad else each, x)


def _writes(given: Sequence[object]) -> list[int]:
    """Return how often each tensor among `given` was written to."""
    return [each._version for each in given if isinstance(each, torch.Tensor)]
