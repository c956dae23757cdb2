"""Residual convolutional nets: torchvision's ResNet, which resnet18 and resnext50_32x4d are, too.

conv1, bn1, relu, maxpool
layer1.0, layer1.1, layer2.0, ...    blocks
avgpool
fc                                   the logits

One tensor travels: float, [rows, channels, height, width].
"""

from typing import Any

import torch
from torch import nn

from stageline.pipeline.tree import Tree

from .family import Family
from .layers import Layer, Layers

_GROUPS = tuple(f"layer{number}" for number in range(1, 5))


def layers(model: Any) -> Layers:
    """Of a ResNet."""
    return Layers(
        model,
        [
            Layer(("conv1", "bn1", "relu", "maxpool"), _stem),
            *(Layer(f"{group}.{number}") for group in _GROUPS for number in range(len(getattr(model, group)))),
            Layer("avgpool", _pool),
            Layer("fc"),
        ],
    )


RESNET = Family("torchvision.models.resnet", {"": "ResNet", **dict.fromkeys(_GROUPS, "Sequential")}, layers)


def _stem(x: Any, conv: nn.Module, norm: nn.Module, relu: nn.Module, pool: nn.Module) -> Tree:
    return pool(relu(norm(conv(x))))  # type: ignore[no-any-return]


def _pool(x: Any, pool: nn.Module) -> Tree:
    return torch.flatten(pool(x), 1)
