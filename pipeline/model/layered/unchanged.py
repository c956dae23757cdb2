"""Contexts in which a model is tried; at their end its weights, gradients, buffers and generators are as before.

Memory that a trial has not written to is not written to either: that of a mapped file may be read-only.
"""

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from stageline.pipeline.stage.layers.passage import generators_kept

from .export import with_memory


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
