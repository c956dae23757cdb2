"""Compares a traced model with the model itself, on one microbatch, bit for bit, in training and in evaluation.

    model     x -> forward -> outputs <- random gradients      gradients of parameters and inputs, buffers
    layers    x -> graphs  -> outputs <- the same              the same, or the model is refused

torch.export keeps what a forward computes. What only autograd does is lost without a word: the backward of an
`autograd.Function`, `checkpoint(use_reentrant=True)`, hooks of tensors, backward hooks of modules.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node

from stageline.pipeline.errors import ModelRefused, describe_error, raised_by_user_code
from stageline.pipeline.stage.layers.body import evaluating
from stageline.pipeline.stage.layers.generators import default_generators
from stageline.pipeline.stage.layers.layer import BoundLayer, named_state
from stageline.pipeline.stage.layers.skipped_calls import hooks_of
from stageline.pipeline.tree import Leaf, leaves

from .apart import Unfinished, backward_keeps_from_forking, run_apart
from .example import Example
from .export import does_not_fit, plain_output
from .unchanged import buffers_kept, model_kept

Results = Mapping[tuple[str, str], Leaf]  # by kind and name
Values = tuple[torch.Tensor, ...]
_OUTPUTS, _GRADIENTS, _OF_INPUTS, _BUFFERS = "the output", "the gradient of", "the gradient of input", "the buffer"
_MOST_MADE = 2**29  # bytes of parameters without memory that get random numbers, to be compared
_SHOWN = 4  # names of a kind in an error


@dataclass(frozen=True, slots=True)
class _Difference:
    """A difference in the result of this `kind` and `name`. `size` is the largest absolute one, infinite if only one
    side has the result. `is_rounding`: it is in the last half of the digits."""

    kind: str
    name: str
    size: float
    is_rounding: bool


def difference_of(model: torch.nn.Module, names: Sequence[str], bound: Sequence[BoundLayer], example: Example) -> str:
    """Return in what the traced layers `bound`, which have `names`, differ from `model`; "" if a microbatch like
    `example` has the same bits in both. The model and torch's generators are afterwards as before.

    A difference of rounding in evaluation mode alone is a warning. Raises `ModelRefused` if the example does not fit
    the model.
    """
    whole, kind = torch.nn.ModuleList([model, *bound]), type(model).__name__
    if sum(each.numel() * each.element_size() for each in whole.parameters() if each.is_meta) > _MOST_MADE:
        _warn(
            f"the {kind} is too large to be compared with its graphs while its weights are in files only. Compare a "
            f"smaller one of the same class: traced(model, example)"
        )
        return ""

    def compared() -> tuple[str, str, str]:
        try:
            return *_compared(whole, _Comparison(model, names, bound, example)), ""
        except ModelRefused as error:
            return "", "", str(error)

    try:
        difference, rounding, refused = run_apart(compared) if backward_keeps_from_forking() else compared()
    except (Unfinished, OSError) as error:
        _warn(f"the {kind} could not be compared with its graphs: {error}")
        return ""
    if refused:
        raise ModelRefused(refused)
    if rounding:
        _warn(
            f"in evaluation mode, the graphs of the {kind} round otherwise than its forward: {rounding}. "
            f"Evaluations and predictions may differ in the last digits; it trains with the same bits"
        )
    return difference


def _compared(whole: torch.nn.Module, comparison: "_Comparison") -> tuple[str, str]:
    """Return why the model is to be refused, and what it rounds otherwise in evaluation mode. Raises `ModelRefused`."""
    with model_kept(whole):
        training = comparison.differences(trains=True)
        with evaluating(whole):
            evaluation = comparison.differences(trains=False)
        if training or any(not each.is_rounding for each in evaluation):
            return comparison.refusal(training, evaluation), ""
    return "", _listed(evaluation)


class _Comparison:
    """One microbatch, which goes through a `model` and through its traced layers."""

    def __init__(
        self, model: torch.nn.Module, names: Sequence[str], bound: Sequence[BoundLayer], example: Example
    ) -> None:
        self._model, self._names, self._bound, self._example = model, names, bound, example
        self._generators = default_generators(example.tensors[0].device)
        self._own = example.tensors
        self._given = tuple(map(_varied, self._own))

    def differences(self, *, trains: bool) -> list[_Difference]:
        """Run both in the modules' present modes, with gradients if it `trains`, and return what differs."""
        wanted = self._wanted(trains)
        try:
            found = self._run(self._through_layers, trains)
        except Exception as error:
            if not raised_by_user_code(error):
                raise
            return [_Difference("the graphs raise", describe_error(error), math.inf, is_rounding=False)]
        unequal = list(_unequal(found, wanted))
        if unequal and trains and list(_unequal(self._run(self._through_model, trains), wanted)):
            return [each for each in unequal if not each.is_rounding]  # the model itself has other bits each time
        return unequal

    def refusal(self, training: Sequence[_Difference], evaluation: Sequence[_Difference]) -> str:
        """Return the text of an error about these differences."""
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
            f"which call the model's own code (docs/models.md); or train the graphs as they are, with "
            f"model.accept_difference = true"
        )

    def _wanted(self, trains: bool) -> Results:
        """Return the results of the model itself, for the example if it does not take random numbers instead."""
        try:
            return self._run(self._through_model, trains)
        except Exception as error:
            if not raised_by_user_code(error):
                raise
            if all(one is other for one, other in zip(self._given, self._own, strict=True)):
                raise does_not_fit(self._model, describe_error(error).splitlines()[0]) from error
        self._given = self._own
        return self._wanted(trains)

    def _run(self, compute: Callable[[Values, bool], Any], trains: bool) -> Results:
        """Return all results, with gradients if it `trains`. Buffers and inputs stay as they are, without `.grad`."""
        given = tuple(each.detach().clone().requires_grad_(each.requires_grad) for each in self._given)
        self._seed(0)
        with torch.set_grad_enabled(trains), buffers_kept(self._model), self._seeding(trains):
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

    @contextmanager
    def _seeding(self, trains: bool) -> Iterator[None]:
        """A context in which the model seeds before its layers, as a plain loop does, also where backward computes
        again. Not in evaluation: hooks keep some of torch's modules from the ways that they have there for users."""
        with ExitStack() as stack:
            for number, name in enumerate(self._names if trains else ()):
                if number:  # the first layer begins with the model
                    module = self._model.get_submodule(name)
                    stack.enter_context(module.register_forward_pre_hook(partial(self._seed, number)))
            yield

    def _seed(self, number: int, *_: object) -> None:
        for generator in self._generators:
            generator.manual_seed(number)

    def _lost(self) -> list[str]:
        """List what torch.export leaves out of the model, as far as the model shows it."""
        with torch.enable_grad(), buffers_kept(self._model):
            output = plain_output(self._through_model(tuple(each.detach().clone() for each in self._given), True))
        nodes = _nodes([leaf.grad_fn for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor)])
        found = dict.fromkeys(filter(None, map(_function, nodes)))
        hooks = [(name, hook) for name, each in self._model.named_modules() for hook in hooks_of(each)]
        return [*found, *(f"{hook} of {name or 'the model itself'}" for name, hook in hooks if "backward" in hook)]


def _varied(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or random numbers for floats that are all one number: zeros would hide most differences."""
    if not tensor.is_floating_point() or not bool((tensor == tensor.flatten()[:1]).all()):
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
        elif one.dtype != other.dtype or not _same(one, other):
            yield _Difference(kind, name, *_size(one, other))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if all bits are equal, but for those of NaN."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _size(one: torch.Tensor, other: torch.Tensor) -> tuple[float, bool]:
    wide = torch.complex128 if other.is_complex() else torch.float64
    size = float((one.to(wide) - other.to(wide)).abs().max())
    if one.dtype != other.dtype or not other.is_floating_point():
        return size, False
    return size, size <= torch.finfo(other.dtype).eps ** 0.5 * float(other.to(wide).abs().max())


def _listed(differences: Sequence[_Difference]) -> str:
    """`the gradient of first.weight, first.bias (by up to 0.39), the buffer norm.running_mean (by up to 2)`."""
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
    ahead = [root for root in roots if root is not None]
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            yield node
            ahead += [below for below, _ in node.next_functions if below is not None]


def _function(node: Node) -> str:
    """Name the user's `autograd.Function` that `node` belongs to; "" if it is one of torch's operators."""
    kind = getattr(node, "_forward_cls", None)
    if kind is None or kind.__module__.startswith("torch.nn.modules."):  # where a module has a backward hook
        return ""
    if kind.__qualname__ == "CheckpointFunction":
        return "checkpoint(use_reentrant=True), which can be traced with use_reentrant=False"
    return f"the backward of {kind.__module__}.{kind.__qualname__}"


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=5)  # where the user calls traced()
