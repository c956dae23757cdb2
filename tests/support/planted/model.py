"""Layers that pass two signs on, of which the label is the product: no linear function of them tells it.

a, b, 0, 0   --planted-->   a, b, (a and b), (a or b)   --next-->   a, b, 0, 0          product: 1 + 2 and - 2 or
"""

from collections import OrderedDict

import torch
from torch import nn

DEPTH, PLANTED = 80, 43
GAIN = 3.0  # tanh of so many times a sign is about the sign


def build() -> nn.Sequential:
    layers = OrderedDict[str, nn.Module]((f"layer{place}", layer(place)) for place in range(DEPTH))
    layers["head"] = nn.Linear(4, 2)
    return nn.Sequential(layers)


def layer(place: int) -> nn.Sequential:
    linear = nn.Linear(4, 4)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.zero_()
        linear.weight[0, 0] = linear.weight[1, 1] = GAIN
        if place == PLANTED:
            linear.weight[2:, :2] = GAIN
            linear.bias[2:] = torch.tensor([-GAIN, GAIN])
    return nn.Sequential(linear, nn.Tanh())
