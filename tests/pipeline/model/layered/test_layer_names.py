"""Which modules are layers follows from the model alone."""

import pytest
from torch import nn

from stageline import ModelRefused
from stageline.pipeline.model.layered.layer_names import layer_names


def block() -> nn.Module:
    """As a residual block: with a list in it, and no list itself."""
    made = nn.Module()
    made.conv, made.down = nn.Conv2d(1, 1, 1), nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())
    return made


def model() -> nn.Module:
    made = nn.Module()
    made.stem = nn.Linear(1, 1)
    made.groups = nn.ModuleList([nn.Sequential(block(), block()), block()])
    made.encoder = nn.Module()
    made.encoder.embed, made.encoder.blocks = nn.Linear(1, 1), nn.ModuleList([block()])
    made.empty, made.head = nn.Sequential(), nn.Linear(1, 1)
    return made


def test_what_is_in_lists_of_modules_is_layers_and_not_what_is_in_that():
    assert layer_names(model()) == [
        "stem",
        "groups.0.0",
        "groups.0.1",
        "groups.1",
        "encoder.embed",
        "encoder.blocks.0",
        "empty",
        "head",
    ]


def test_modules_that_are_named_are_looked_into():
    assert layer_names(model(), ["groups.0.1", "encoder.blocks.0"])[2:8] == [
        "groups.0.1.conv",
        "groups.0.1.down.0",
        "groups.0.1.down.1",
        "groups.1",
        "encoder.embed",
        "encoder.blocks.0.conv",
    ]
    with pytest.raises(ModelRefused, match=r"has no module encoder\.block\.0; its names include encoder\.blocks\.0"):
        layer_names(model(), ["encoder.block.0"])
