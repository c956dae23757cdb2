"""Lets a model be tried without a trace: weights, gradients, buffers, generators and modes are afterwards as before."""

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from stageline.pipeline.stage.layers.generators import generators_kept

from .export import with_memory


@contextmanager
def model_kept(whole: torch.nn.Module) -> Iterator[None]:
    """A context in which `whole` may run forward and backward. Its parameters have neither gradients nor the user's
    hooks, such as that of an optimizer; those without memory have random numbers. torch's warnings are not shown: the
    first step will show them."""
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
    """A context at whose end each buffer of `model` is the tensor that it was, with its values; and Python's own random
    generator has its state."""
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
            buffer.data.copy_(value)  # unseen by autograd


@contextmanager
def _parameter_kept(parameter: torch.Tensor, *, copied: bool) -> Iterator[None]:
    """A forward may write to a parameter, as that of an `nn.Embedding` with `max_norm` does: it is `copied` before."""
    tables: list[dict[int, Any]] = [
        parameter._backward_hooks or {},
        parameter._post_accumulate_grad_hooks or {},
    ]
    hooks = [dict(table) for table in tables]
    gradient, values = parameter.grad, parameter.detach().clone() if copied else None
    parameter.grad = None
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        parameter.grad = gradient
        for table, former in zip(tables, hooks, strict=True):
            table.update(former)
        if values is not None and not torch.equal(parameter, values):
            parameter.data.copy_(values)


def _fill(data: torch.Tensor) -> None:
    if not data.is_floating_point():
        data.zero_()
    elif data.dim() > 1:
        data.normal_(std=0.02)
    else:
        data.uniform_()
