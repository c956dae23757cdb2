"""Weights that a script loads are checked before anything is sent."""

import pytest
import torch
from torch import nn

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.cut import cut_model
from stageline.workers.script.begin import weights_of

MODEL = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
WEIGHTS = weights_of(MODEL, cut_model(MODEL, [2], None))


def test_the_models_own_weights_are_accepted():
    WEIGHTS.check(MODEL.state_dict())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"0.weight": torch.zeros(8, 5)}, r"0.weight has shape \(8, 5\), expected \(8, 4\)"),
        ({"0.weight": torch.zeros(8, 4).double()}, r"0.weight has dtype torch.float64, expected torch.float32"),
        ({"1.running_mean": [0.0] * 8}, "1.running_mean is of type list, not a tensor"),
        ({"1.runing_mean": torch.zeros(8), "1.running_mean": None}, 'did you mean "1.running_mean"'),
    ],
)
def test_what_differs_is_named(change: dict[str, object], told: str):
    state = {name: value for name, value in {**MODEL.state_dict(), **change}.items() if value is not None}
    with pytest.raises(ModelRefused, match=told):
        WEIGHTS.check(state)


def test_the_order_is_that_of_the_unsplit_model():
    shuffled = dict(sorted(MODEL.state_dict().items(), reverse=True))
    assert list(shuffled) != list(MODEL.state_dict())
    assert list(WEIGHTS.in_order(shuffled)) == list(MODEL.state_dict())


def test_weights_that_are_one_parameter_must_be_equal():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    weights = weights_of(model, cut_model(model, [1], None))
    weights.check(model.state_dict())
    with pytest.raises(ModelRefused, match=r"1.weight and 0.weight differ, and are one parameter"):
        weights.check({**model.state_dict(), "1.weight": torch.zeros(4, 4)})
