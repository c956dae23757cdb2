"""A stage's layers go by the unsplit model's names."""

import pytest
import torch
from torch import nn

from stageline.pipeline.stage.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")


def layers(seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [
        nn.Linear(8, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(16, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Linear(16, 3),
    ]


def test_state_goes_out_and_in_under_the_unsplit_models_names():
    stage, other = (Stage(layers(seed)[3:], first_layer=3) for seed in (1, 2))
    other.load_state_dict({name: value.clone() for name, value in stage.state_dict().items()})
    assert list(stage.state_dict()) == ["3.weight", "3.bias", "6.weight", "6.bias"]
    assert all(torch.equal(other.state_dict()[name], value) for name, value in stage.state_dict().items())
