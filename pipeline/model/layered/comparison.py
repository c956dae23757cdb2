"""Comparison of a traced model with the model itself, on one microbatch, bit for bit, in training and in evaluation.

    model     x -> forward -> outputs <- random gradients      gradients of parameters and inputs, buffers
    layers    x -> graphs  -> outputs <- the same              the same, or the model is refused

torch.export keeps what a forward computes. What only autograd does is lost without a word: the backward of an
`autograd.Function`, `checkpoint(use_reentrant=True)`, hooks of tensors, backward hooks of modules.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node

from stageline.pipeline.errors import ModelRefused, describe_error, raised_by_user_code
from stageline.pipeline.stage.layers.body import evaluating
from stageline.pipeline.stage.layers.layer import BoundLayer, named_state
from stageline.pipeline.stage.layers.passage import default_generators
from stageline.pipeline.stage.layers.skipped_calls import hooks_in
from stageline.pipeline.tree import Leaf, leaves

from .apart import Unfinished, backward_keeps_from_forking, run_apart
from .example import Example
from .output import plain_output
from .refusal import does_not_fit
from .seeding import seeded_calls
from .unchanged import PythonEffects, buffers_kept, model_kept

Results = Mapping[tuple[str, str], Leaf]  # (kind, name) -> result
Values = tuple[torch.Tensor, ...]
_OUTPUTS, _GRADIENTS, _OF_INPUTS, _BUFFERS = "the output", "the gradient of", "the gradient of input", "the buffer"
_MOST_MADE = 2**29  # bytes of parameters without memory that get random numbers, to be compared
_SHOWN = 4  # names of a kind in an error


@dataclass(frozen=True, slots=True)
class _Difference:
    """A difference in one result.

    Attributes:
        kind: The kind of the result.
        name: The name of the result.
        size: The largest absolute difference; infinite if only one side has the result.
        is_rounding: True if the difference is in the last half of the digits.
    """

    kind: str
    name: str
    size: float
    is_rounding: bool


def difference_of(model: torch.nn.Module, names: Sequence[str], bound: Sequence[BoundLayer], example: Example) -> str:
    """Return in what traced layers differ from their model; "" if a microbatch has the same bits in both.

    The model and torch's generators are afterwards as before. A difference in evaluation mode alone is a warning if it
    is of rounding, or of torch's fast path.

    Args:
        model: The model.
        names: Names of the layers.
        bound: The traced layers.
        example: The microbatch.

    Raises:
        ModelRefused: The example does not fit the model.
    """
    whole, kind = torch.nn.ModuleList([model, *bound]), type(model).__name__
    if sum(each.numel() * each.element_size() for each in whole.parameters() if each.is_meta) > _MOST_MADE:
        _warn(
            f"the {kind} is too large to be compared with its graphs while its weights are in files only. Compare a "
            f"smaller one of the same class: traced(model, example)"
        )
        return ""

    def compared() -> list[str]:
        try:
            with model_kept(whole):
                return ["", *_Comparison(model, names, bound, example).verdict(whole)]
        except ModelRefused as error:
            return [str(error), ""]
        except Exception as error:  # noqa: BLE001  # such as a tensor that an operator does not take: not compared
            return ["", _not_compared(kind, error)]

    try:
        refused, difference, *said = run_apart(compared) if backward_keeps_from_forking() else compared()
    except (Unfinished, OSError) as error:
        _warn(
            f"the {kind} could not be compared with its graphs: {error}. They may train with other gradients than the "
            f"model. Trace it again, with a smaller example or more free memory"
        )
        return ""
    if refused:
        raise ModelRefused(refused)
    for text in said:
        _warn(text)
    return difference


def _not_compared(kind: str, error: Exception) -> str:
    return (
        f"the {kind} could not be compared with its graphs: the comparison raised {describe_error(error)}. List the "
        f"layers yourself, with stageline.Layers (docs/guides/models.md); or train the graphs as they are, with "
        "model.accept_difference = true (in a script, accept_difference=True)"
    )


class _Comparison:
    """A microbatch that goes through a model and through its traced layers."""

    def __init__(
        self, model: torch.nn.Module, names: Sequence[str], bound: Sequence[BoundLayer], example: Example
    ) -> None:
        """Prepare the microbatch.

        Inputs and parameters that are all one number are varied, since zeros would hide most differences.
        """
        self._model, self._names, self._bound, self._example = model, names, bound, example
        self._generators = default_generators(example.tensors[0].device)
        self._own = example.tensors
        self._given = tuple(map(_varied, self._own))
        self._constant = [(each, each.detach().clone()) for each in model.parameters() if _is_constant(each)]
        self._is_varied = bool(self._constant) or any(map(_is_constant, self._own))
        self._said: list[str] = []
        self._effects = PythonEffects(model)
        generator = torch.Generator().manual_seed(2)
        for parameter, _ in self._constant:
            parameter.data.add_((0.1 * torch.rand(parameter.shape, generator=generator)).to(parameter))

    def verdict(self, whole: torch.nn.Module) -> list[str]:
        """Return why the model is to be refused, "" if it is not, and after it the texts of warnings.

        Args:
            whole: A module that has the model and all its layers.
        """
        training = self.differences(trains=True)
        with evaluating(whole):
            evaluation = self.differences(trains=False)
            if beyond := any(not each.is_rounding for each in evaluation):
                with _slow_path():
                    beyond = any(not each.is_rounding for each in self.differences(trains=False))
        refused = self._effects.refusal or (self.refusal(training, evaluation) if training or beyond else "")
        others = [] if refused else [*self._effects.warnings, *self._warnings(evaluation)]
        return [refused, *self._said, *others]

    def _warnings(self, evaluation: Sequence[_Difference]) -> Iterator[str]:
        kind = type(self._model).__name__
        if any(not each.is_rounding for each in evaluation):
            yield (
                f"in evaluation mode, torch's fast path for nn.TransformerEncoder and nn.MultiheadAttention computes "
                f"something else than the graphs of the {kind}, such as in rows that a mask leaves out: "
                f"{_listed(evaluation)}. The graphs compute what the model does after "
                f"torch.backends.mha.set_fastpath_enabled(False); it trains with the same bits"
            )
        elif evaluation:
            yield (
                f"in evaluation mode, the graphs of the {kind} round otherwise than its forward: "
                f"{_listed(evaluation)}. Evaluations and predictions may differ in the last digits; it trains with the "
                f"same bits"
            )

    def differences(self, *, trains: bool) -> list[_Difference]:
        """Run the model and its layers in the modules' present modes, and return what differs.

        Args:
            trains: True to compute gradients too.
        """
        wanted = self._wanted(trains)
        with buffers_kept(self._model):
            try:
                found = self._run(self._through_layers, trains)
            except Exception as error:
                if not raised_by_user_code(error):
                    raise
                return [_Difference("the graphs raise", describe_error(error), math.inf, is_rounding=False)]
        unequal = list(_unequal(found, wanted))
        if unequal and trains and list(_unequal(self._wanted(trains), wanted)):
            return [each for each in unequal if not each.is_rounding]  # the model itself has other bits each time
        return unequal

    def refusal(self, training: Sequence[_Difference], evaluation: Sequence[_Difference]) -> str:
        """Return the text of an error about the differences in training mode and in evaluation mode."""
        modes = {"training": training, "evaluation": evaluation}
        said = "; ".join(f"in {mode} mode, {_listed(each)}" for mode, each in modes.items() if each)
        gradients = {each.name for each in training if each.kind == _GRADIENTS}
        named = zip(self._names, self._bound, strict=True)
        at = [name for name, layer in named if any(key in gradients for key, _ in named_state(layer, name))]
        lost = "; ".join(self._lost()) or "such as a hook of a tensor, or a decision that Python makes in each call"
        return (
            f"torch.export has traced the {type(self._model).__name__}, but its graphs compute something else: {said}. "
            f"{f'The last such gradient is in layer {at[-1]}. ' if at else ''}Graphs have what a forward computes, "
            f"without what only autograd or Python does: {lost}. List the layers yourself, with stageline.Layers, "
            f"which call the model's own code (docs/guides/models.md); or train the graphs as they are, with "
            "model.accept_difference = true (in a script, accept_difference=True)"
        )

    def _wanted(self, trains: bool) -> Results:
        """Return the results of the model itself.

        The example and the weights are taken as they are if the model raises for random numbers in place of those that
        are all one number, or makes NaN of them.
        """
        with buffers_kept(self._model), self._effects.watched():  # their errors are not the model's
            try:
                results = self._run(self._through_model, trains)
            except Exception as error:
                if not raised_by_user_code(error):
                    raise
                if not self._is_varied:
                    raise does_not_fit(
                        self._model, self._example.inputs, describe_error(error).splitlines()[0]
                    ) from error
                results = None
        unknown = [f"{kind} {name}" for (kind, name), each in (results or {}).items() if _is_nan(kind, each)]
        if results is not None and not (unknown and self._is_varied):
            if unknown:
                self._said = [self._not_told(unknown)]
            return results
        self._given, self._is_varied = self._own, False
        for parameter, value in self._constant:
            parameter.data.copy_(value)
        return self._wanted(trains)

    def _not_told(self, unknown: Sequence[str]) -> str:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        return (
            f"the {type(self._model).__name__} itself makes NaN of the example: {', '.join(unknown[:_SHOWN])}{more}. "
            f"There, its graphs are not compared with it. Trace it with an example of which it makes numbers"
        )

    def _run(self, compute: Callable[[Values, bool], Any], trains: bool) -> Results:
        """Return all results of `compute`, with gradients if it `trains`. Inputs stay as they are, without `.grad`."""
        for parameter in self._model.parameters():
            parameter.grad = None  # left by a run that has raised
        given = tuple(each.detach().clone().requires_grad_(each.requires_grad) for each in self._given)
        self._seed(0)
        with torch.set_grad_enabled(trains), self._seeding(trains):
            output = dict(leaves(plain_output(compute(given, trains))))
            found = {(_OUTPUTS, path): leaf for path, leaf in output.items()}
            if trains:
                _backward([leaf for leaf in output.values() if isinstance(leaf, torch.Tensor) and leaf.requires_grad])
            found |= {(_BUFFERS, name): each.clone() for name, each in self._model.named_buffers()}
        found |= {(_OF_INPUTS, str(number)): each.grad for number, each in enumerate(given)}
        for name, parameter in self._model.named_parameters():
            found[_GRADIENTS, name], parameter.grad = parameter.grad, None
        return {name: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for name, leaf in found.items()}

    def _through_model(self, given: Values, _: bool) -> Any:
        return self._example.call(self._model, given)

    def _through_layers(self, given: Values, trains: bool) -> Any:
        x = self._example.with_tensors(given)
        for number, layer in enumerate(self._bound):
            if trains and number:
                self._seed(number)
            x = layer(x)
        return x

    def _seeding(self, trains: bool) -> AbstractContextManager[None]:
        """Return a context in which the model seeds before its layers.

        In evaluation it does not: hooks keep some of torch's modules from the ways that they have there for users.
        """
        return seeded_calls(self._model, self._names if trains else (), self._seed)

    def _seed(self, number: int, *_: object) -> None:
        for generator in self._generators:
            generator.manual_seed(number)

    def _lost(self) -> list[str]:
        """Return what torch.export leaves out of the model, as far as the model shows it."""
        buffers = dict(self._model.named_buffers())
        with torch.enable_grad(), buffers_kept(self._model):
            output = plain_output(self._through_model(tuple(each.detach().clone() for each in self._given), True))
            assigned = [name for name, each in self._model.named_buffers() if each is not buffers.get(name)]
        nodes = _nodes([leaf.grad_fn for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor)])
        found = dict.fromkeys(filter(None, map(_function, nodes)))
        hooks = hooks_in(list(self._model.named_modules()))
        written = [f"the assignment of {name}, which {name}.copy_(...) would write in place" for name in assigned]
        backward = [title for title, _ in hooks if "backward" in title]
        return [*found, *backward, *written, *(f"the change of {name}" for name in self._effects.changed)]


@contextmanager
def _slow_path() -> Iterator[None]:
    """Turn off, in the context, torch's other ways to compute where nothing needs a gradient."""
    former = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(former)


def _is_constant(tensor: torch.Tensor) -> bool:
    """Return True for floats that are all one number."""
    return tensor.is_floating_point() and bool((tensor == tensor.flatten()[:1]).all())


def _is_nan(kind: str, leaf: Leaf) -> bool:
    """Return True for a computed result with NaN. Buffers do not count: they may have NaN from the start."""
    return kind != _BUFFERS and isinstance(leaf, torch.Tensor) and bool(leaf.to_dense().isnan().any())


def _varied(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or random numbers for floats that are all one number: zeros would hide most differences."""
    if not _is_constant(tensor):
        return tensor
    made = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0))
    return made.to(tensor.device, tensor.dtype).requires_grad_(tensor.requires_grad)


def _backward(ends: Sequence[torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(each.shape, generator=generator).to(each.device, each.dtype) for each in ends]
    if ends:
        torch.autograd.backward(ends, gradients)


def _unequal(found: Results, wanted: Results) -> Iterator[_Difference]:
    for kind, name in dict.fromkeys((*wanted, *found)):
        one, other = found.get((kind, name)), wanted.get((kind, name))
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.shape != other.shape:
            if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor) or one != other:
                yield _Difference(kind, name, math.inf, is_rounding=False)
            continue
        is_like = (one.dtype, one.layout) == (other.dtype, other.layout)
        one, other = one.to_dense(), other.to_dense()  # torch compares no sparse gradients
        if not is_like or not _same(one, other):
            size, is_rounding = _size(one, other)
            yield _Difference(kind, name, size, is_rounding and is_like)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if all bits are equal, except those of NaN."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _size(one: torch.Tensor, other: torch.Tensor) -> tuple[float, bool]:
    wide = torch.complex128 if other.is_complex() else torch.float64
    size = float((one.to(wide) - other.to(wide)).abs().max())
    if one.dtype != other.dtype or not other.is_floating_point():
        return size, False
    return size, size <= torch.finfo(other.dtype).eps ** 0.5 * float(other.to(wide).abs().max())


def _listed(differences: Sequence[_Difference]) -> str:
    """Return differences as text, by kind.

    An example is `the gradient of first.weight, first.bias (by up to 0.39), the buffer norm.running_mean (by up to 2)`.
    """
    kinds = dict.fromkeys(each.kind for each in differences)
    return ", ".join(_of_kind(kind, [each for each in differences if each.kind == kind]) for kind in kinds)


def _of_kind(kind: str, differences: Sequence[_Difference]) -> str:
    names = ", ".join(each.name for each in differences[:_SHOWN])
    more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    sizes = [each.size for each in differences if math.isfinite(each.size)]
    size = f"by up to {max(sizes):.2g}" if sizes else ""
    one_sided = "" if len(sizes) == len(differences) else f"{len(differences) - len(sizes)} on one side only"
    return f"{kind} {names}{more} ({', '.join(filter(None, (size, one_sided)))})".replace("  ", " ")


def _nodes(roots: Sequence[Node | None]) -> Iterator[Node]:
    seen: set[Node] = set()
    stack = [root for root in roots if root is not None]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += [below for below, _ in node.next_functions if below is not None]


def _function(node: Node) -> str:
    """Return the user's `autograd.Function` that `node` belongs to, as text; "" if it is one of torch's operators."""
    kind = getattr(node, "_forward_cls", None)
    if kind is None or kind.__module__.startswith("torch.nn.modules."):  # where a module has a backward hook
        return ""
    if kind.__qualname__ == "CheckpointFunction":
        return "checkpoint(use_reentrant=True), which can be traced with use_reentrant=False"
    return f"the backward of {kind.__module__}.{kind.__qualname__}"


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)  # traced() lets it be of its caller
