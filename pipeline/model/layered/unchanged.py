"""Contexts in which a model is tried: at their end it is as before, or it is known what in Python has changed.

Memory that a trial has not written to is not written to either: that of a mapped file may be read-only.
"""

import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from stageline.pipeline.stage.layers.layer import joined
from stageline.pipeline.stage.layers.passage import generators_kept

from .export import with_memory

_PLAIN = (bool, int, float, str)
_SHOWN = 4  # names in a text


@contextmanager
def model_kept(whole: torch.nn.Module) -> Iterator[None]:
    """Keep `whole` as it is while it runs forward and backward in the context.

    Its floating parameters are copies there, all of which require a gradient, since a frozen one may be trained later.
    They have neither gradients nor the user's hooks, such as that of an optimizer; those without memory have random
    numbers. torch's warnings are not shown: the first step will show them.
    """
    tables: list[dict[str, Any]] = [module._parameters for module in whole.modules()]
    empty = [(table, key) for table in tables for key, each in table.items() if each is not None and each.is_meta]
    with (
        with_memory(whole),
        warnings.catch_warnings(action="ignore"),
        generators_kept(next((each.device for each in whole.parameters()), torch.device("cpu"))),
        ExitStack() as stack,
    ):
        for table, key in empty:
            _fill(table[key].data)
        for parameter in whole.parameters():
            stack.enter_context(_parameter_kept(parameter, copied=not empty))
        yield


@contextmanager
def buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Keep each buffer of `model`, as the tensor that it is, with its values, and the state of Python's `random`.

    Other attributes that a forward changes, and NumPy's generator, are not restored.
    """
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    values = [(each, each.clone()) for each in model.buffers()]
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
        for table, former in tables:
            table.clear()
            table.update(former)
        for buffer, value in values:
            if not _same_bits(buffer, value):
                buffer.data.copy_(value)  # unseen by autograd


@contextmanager
def _parameter_kept(parameter: torch.Tensor, *, copied: bool) -> Iterator[None]:
    """Keep a parameter as it is. In the context it has other memory, with the same values, if `copied`.

    A forward may write to a parameter, as that of an `nn.Embedding` with `max_norm` does.
    """
    tables: list[dict[int, Any]] = [
        parameter._backward_hooks or {},
        parameter._post_accumulate_grad_hooks or {},
    ]
    hooks = [dict(table) for table in tables]
    gradient, required, data = parameter.grad, parameter.requires_grad, parameter.data
    parameter.grad = None
    if copied:
        parameter.data = data.clone(memory_format=torch.preserve_format)
    if (data.is_floating_point() or data.is_complex()) and not parameter.is_inference():
        parameter.requires_grad_(True)
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        parameter.grad = None  # before the memory: that of a gradient fits the other
        parameter.data = data
        parameter.requires_grad_(required)
        parameter.grad = gradient
        for table, former in zip(tables, hooks, strict=True):
            table.update(former)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(one) is not torch.Tensor or one.layout is not torch.strided or one.is_quantized:
        return False
    return one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _fill(data: torch.Tensor) -> None:
    if not data.is_floating_point():
        data.zero_()
    elif data.dim() > 1:
        data.normal_(std=0.02)
    else:
        data.uniform_()


class PythonEffects:
    """Effects of calls in Python, which a traced graph does not have: on generators and on attributes of modules.

        if random.random() < 0.1          drawn once, when the model was traced: the graph has the one branch
        self.calls += 1                   the graph counts nothing, and computes with the number of the trace

    What a few calls compute rarely shows it, so the state of Python itself is compared before and after a call.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Begin without a call of `model`."""
        self._model = model
        self._drawn: set[str] = set()
        self._changed: set[str] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note, at the end of the context, what has changed in it."""
        generators, attributes = _generators(), _attributes(self._model)
        yield
        self._drawn |= _changed(generators, _generators())
        self._changed |= _changed(attributes, _attributes(self._model))

    @property
    def refusal(self) -> str:
        """Text of an error for a model that draws from Python's generators; "" for another."""
        if not self._drawn:
            return ""
        return (
            f"the forward of the {self._kind} draws from {' and '.join(sorted(self._drawn))}, and its graphs have what "
            f"was drawn when it was traced. Draw with torch, such as torch.rand(()), and compute with the number "
            f"instead of branching; or list the layers yourself, with stageline.Layers, which call the model's own "
            f"code (docs/guides/models.md); or train the graphs as they are, with model.accept_difference = true (in a "
            f"script, accept_difference=True)"
        )

    @property
    def warnings(self) -> Iterator[str]:
        """Texts of warnings about attributes that the model changes, and its graphs do not."""
        if names := self.changed:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            yield (
                f"each call of the {self._kind} changes {', '.join(names[:_SHOWN])}{more}, and its graphs compute with "
                f"the value when it was traced. If the output depends on it, register a buffer instead, and write to "
                f"it in place, or list the layers yourself, with stageline.Layers (docs/guides/models.md)"
            )

    @property
    def changed(self) -> list[str]:
        """Names of the attributes that calls have changed, such as `blocks.0.calls`."""
        return sorted(self._changed)

    @property
    def _kind(self) -> str:
        return type(self._model).__name__


def _generators() -> dict[str, object]:
    """Return the states of the generators of Python and, if it is imported, of NumPy."""
    of_numpy = getattr(sys.modules.get("numpy"), "random", None)
    found: dict[str, object] = {"Python's random": random.getstate()}
    if of_numpy is not None:
        _, numbers, *places = of_numpy.get_state()
        found["numpy.random"] = numbers.tobytes(), places
    return found


def _attributes(model: torch.nn.Module) -> dict[str, object]:
    """Return the numbers and texts among the attributes of all modules, by their names in the model."""
    return {
        joined(name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in _PLAIN
    }


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    return {name for name in before.keys() & after.keys() if before[name] != after[name]}
