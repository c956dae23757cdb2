"""Layers beside a cut that make what crosses it tell less: the first two last before it, the third first after it,
since each stands with the one who sends. Each has a price in accuracy.

    AddNoise            forward    x + share * std(x) * N(0, 1), in training and evaluation
    ClipRows            forward    rows with a larger norm are scaled down to it
    EqualNormGradients  backward   each row's gradient is scaled to the mean norm: norms tell no labels, directions do

A stage's layers are seeded one by one, so noise is the same wherever the model is cut, and in a run that is repeated.
"""

from typing import Any

import torch
from torch import Tensor, nn


class AddNoise(nn.Module):
    """Adds normal noise, whose deviation is `share` of that of all numbers of its input. Raises `ValueError` for a
    share that is not above 0."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = _positive("share", share)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, ...], floating; the same shape and dtype."""
        return x + self.share * x.detach().std(correction=0) * torch.randn_like(x)

    def extra_repr(self) -> str:
        return f"{self.share:g}"


class ClipRows(nn.Module):
    """Scales rows whose Euclidean norm is above `norm` down to it. Raises `ValueError` for one that is not above 0."""

    def __init__(self, norm: float) -> None:
        super().__init__()
        self.norm = _positive("norm", norm)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, ...], floating; the same shape and dtype."""
        norms = x.detach().flatten(1).norm(dim=1).reshape(-1, *[1] * (x.dim() - 1))
        clipped: Tensor = x * (self.norm / norms.clamp(min=self.norm))
        return clipped

    def extra_repr(self) -> str:
        return f"{self.norm:g}"


class EqualNormGradients(nn.Module):
    """Gives back its input. In the backward, each row's gradient gets the mean norm of the microbatch's rows; one of
    zeros stays so."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, ...], floating; the same tensor's values."""
        found: Tensor = _EqualNorm.apply(x)  # type: ignore[no-untyped-call]
        return found


class _EqualNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        norms = gradient.flatten(1).norm(dim=1)
        scale = torch.where(norms > 0, norms.mean() / norms, torch.zeros_like(norms))
        return gradient * scale.reshape(-1, *[1] * (gradient.dim() - 1))


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} = {value:g}: expected a number above 0")
    return value
