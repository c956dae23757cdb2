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


class Merging(nn.Linear):
    """Does something of its own when its mode changes, as adapters do that merge their weights for evaluation."""

    merged = False

    def train(self, mode: bool = True) -> "Merging":
        self.merged = not mode
        return super().train(mode)


def test_after_an_evaluation_every_module_is_in_the_mode_it_was_in():
    """The whole stage was put into training mode: a BatchNorm that its user had frozen was trained from then on."""
    frozen, inner, adapter = nn.BatchNorm1d(8).eval(), nn.Dropout(0.3), Merging(8, 8)
    block = nn.Sequential(nn.Linear(8, 8), inner).eval()
    inner.train()
    stage = Stage([frozen, block, adapter])
    modes = {module: module.training for layer in (frozen, block, adapter) for module in layer.modules()}
    stage.evaluate(torch.ones(2, 8))
    assert {module: module.training for module in modes} == modes
    assert not adapter.merged
    assert torch.equal(stage.evaluate(torch.ones(2, 8)), stage.evaluate(torch.ones(2, 8)))


def test_a_layer_that_raises_in_an_evaluation_leaves_the_modes_too():
    norm = nn.BatchNorm1d(8)
    with pytest.raises(RuntimeError):
        Stage([norm, nn.Linear(7, 8)]).evaluate(torch.ones(2, 8))
    assert norm.training
