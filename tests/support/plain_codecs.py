"""The codecs between stages in plain torch, written from docs/guides/codecs.md, for loops over an unsplit model."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Change = Callable[[Tensor], Tensor]


def lossless(x: Tensor) -> Tensor:
    return x


def bf16(x: Tensor) -> Tensor:
    """Tensor that arrives for one of float32 or float64 with finite numbers."""
    return x.to(torch.bfloat16).to(x.dtype)


def int8(x: Tensor) -> Tensor:
    """Tensor that arrives for one of two or more dimensions with finite numbers, if that is fewer bytes."""
    row = 1
    for size in reversed(x.shape[1:]):
        if row >= 64:
            break
        row *= size
    if x.numel() + 4 * (x.numel() // max(row, 1)) >= x.numel() * x.itemsize:
        return x
    rows = x.float().reshape(-1, row)
    scale = rows.abs().amax(1, keepdim=True) / 127
    steps = torch.where(scale > 0, rows / scale, 0.0).round().clamp(-127, 127)
    return (steps * scale).view(x.shape).to(x.dtype)


CODECS: dict[str, Change] = {"lossless": lossless, "bf16": bf16, "int8": int8}


class _Cut(torch.autograd.Function):
    """Changes what goes forward by one codec and the gradient that comes back by another."""

    @staticmethod
    def forward(context: Any, x: Tensor, there: Change, back: Change) -> Tensor:
        context.back = back
        return there(x.detach()).clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return context.back(gradients[0]), None, None


def cut_at(model: nn.Sequential, codecs: Mapping[int, tuple[str, str]]) -> nn.Sequential:
    """`model`, changed in place: before the layers of these numbers lie cuts with these codecs, forward and backward.
    Its parameters keep their names, and its layers their numbers."""
    for layer, (there, back) in codecs.items():
        model[layer].register_forward_pre_hook(_passing(CODECS[there], CODECS[back]))
    return model


def _passing(there: Change, back: Change) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor]:
    return lambda module, given: _Cut.apply(given[0], there, back)  # type: ignore[no-any-return, no-untyped-call]
