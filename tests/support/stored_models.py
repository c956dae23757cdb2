"""Stages whose weights are in files, and the model that is built whole with the same weights."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stageline.pipeline.model.cut import Segment, make_segments, with_stored_weights
from support.small_plans import plan

CUT = [2, 4]


def model() -> nn.Sequential:
    """Three stages at `CUT`; layers that keep references to parameters, statistics, and a parameter with two names."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Tanh(), nn.Sequential(first, second))


def trained(make: Callable[[], Any] = model) -> dict[str, torch.Tensor]:
    """A state dict of other values than `make` begins with."""
    generator = torch.Generator().manual_seed(7)
    made = make()
    for tensor in made.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        else:
            tensor.add_(3)
    return {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}


def stored_segments(
    weights: Path, make: Callable[[], Any] = model, cut: list[int | str] | list[int] = CUT
) -> list[Segment]:
    """The stages of a plan with `model.weights`, nothing of them loaded."""
    made, segments = make_segments(make, 0, cut or None, stored=True)
    return with_stored_weights(plan(model__weights=str(weights), model__cut=list(cut) or None), made, segments, Path())


def allocated(segments: Sequence[Segment]) -> int:
    """How many numbers of the model's parameters have memory."""
    parameters = {p for part in segments for layer in part.layers for p in layer.parameters()}
    return sum(parameter.numel() for parameter in parameters if not parameter.is_meta)
