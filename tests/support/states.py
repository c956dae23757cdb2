"""Compares states of stages to the bit: values, types, and how tensors lie in memory."""

from collections import Counter
from dataclasses import fields
from math import isnan
from typing import Any

import torch
from torch import Tensor

from stageline.pipeline.features.versions import InFlight, Previous
from stageline.pipeline.stage.layers.memory import skew_of
from stageline.pipeline.stage.stage_state import StageState


def difference(one: Any, other: Any, path: str = "") -> str:
    """The path of the first difference between two states, or parts of states; empty if there is none."""
    if type(one) is not type(other):
        return f"{path}: {type(one)} and {type(other)}"
    match one:
        case Tensor():
            return "" if alike(one, other) else f"{path}: {one} and {other}"
        case StageState() | InFlight() | Previous():
            pairs = [(f.name, getattr(one, f.name), getattr(other, f.name)) for f in fields(one)]
        case dict():
            if one.keys() != other.keys():
                return f"{path}: {sorted(map(str, one.keys() ^ other.keys()))}"
            pairs = [(key, one[key], other[key]) for key in one]
        case list() | tuple():
            if len(one) != len(other):
                return f"{path}: {len(one)} and {len(other)}"
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


def make_state(seed: int = 0) -> StageState:
    """A state with something of everything that a snapshot must bring back."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(2, 3, 4, 5, generator=generator)
    weights = {"3.weight": block.clone(), "3.bias": torch.zeros(()), "4.count": torch.tensor(2**53 + 1)}
    moments = {
        "step": torch.tensor(3.0),
        "exp_avg": block.to(memory_format=torch.channels_last),
        "transposed": torch.randn(4, 3, generator=generator).T,
        "with gaps": torch.randn(4, 6, generator=generator)[:, ::2],
        "off alignment": torch.randn(9, generator=generator)[1:],
        "flat": torch.randn(5, 1, 1, generator=generator).as_strided((5, 1, 1), (1, 5, 5)),
        "block": block,
        "complex": torch.complex(block[0, 0], block[0, 1]).T,
        "complex128": torch.complex(block[0, 0].double(), block[0, 1].double())[:, :2],
        "half": block[0].bfloat16(),
        "eighth": block[1].to(torch.float8_e4m3fn),
        "mask": block > 0,
        "empty": torch.zeros(0, 3),
        "not numbers": torch.tensor([float("nan"), float("-inf"), -0.0]),
    }
    group = {"lr": 0.1, "betas": (0.9, 0.999), "maximize": False, "foreach": None, "worst": float("inf"), "params": [0]}
    return StageState(
        weights=weights,
        buffers={"5.hidden": torch.arange(4).to(torch.uint16)},
        gradients={"3.bias": torch.tensor(1.5)},
        optimizer={"state": {0: moments}, "param_groups": [group]},
        lr_scheduler={"milestones": Counter([2, 2, 7]), "last_epoch": 3, "_last_lr": [0.1]},
        in_flight=(
            InFlight(7, 0, {"3.weight": block.flip(0)}, {"4.count": torch.tensor(9)}),
            InFlight(8, 0, {"3.weight": block.flip(1)}, {}),
            InFlight(9, 0, {"3.weight": block, "3.bias": block[1, 2, 3, 4]}, {}),  # in memory of others
        ),
        averages={"3.weight": block.to(memory_format=torch.channels_last) / 3, "3.bias": torch.tensor(0.3)},
    )
