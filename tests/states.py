"""Compares states of stages to the bit: values, types, and how tensors lie in memory."""

from dataclasses import fields
from math import isnan
from typing import Any

import torch
from torch import Tensor

from pipeline.placing import skew_of
from pipeline.state import InFlight, StageState


def difference(one: Any, other: Any, path: str = "") -> str:
    """The path of the first difference between two states, or parts of states; empty if there is none."""
    if type(one) is not type(other):
        return f"{path}: {type(one)} and {type(other)}"
    match one:
        case Tensor():
            return "" if alike(one, other) else f"{path}: {one} and {other}"
        case StageState() | InFlight():
            pairs = [(f.name, getattr(one, f.name), getattr(other, f.name)) for f in fields(one)]
        case dict() if list(one) == list(other):
            pairs = [(key, one[key], other[key]) for key in one]
        case list() | tuple() if len(one) == len(other):
            pairs = [(place, *each) for place, each in enumerate(zip(one, other, strict=True))]
        case _:
            return "" if one == other or (_nan(one) and _nan(other)) else f"{path}: {one} and {other}"
    found = (difference(*each, f"{path}.{key}") for key, *each in pairs)
    return next((each for each in found if each), "")


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits and lie alike."""
    lie = [(t.dtype, t.shape, t.stride(), skew_of(t), t.requires_grad) for t in (one, other)]
    return lie[0] == lie[1] and torch.equal(_bits(one), _bits(other))


def _nan(value: Any) -> bool:
    return isinstance(value, float) and isnan(value)


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().contiguous().reshape(-1).view(torch.uint8)
