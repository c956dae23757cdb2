"""A gradient must match the stashed outputs, place by place."""

import pytest
import torch
from torch import Tensor, nn

from stageline.pipeline.errors import GradientMismatch
from stageline.pipeline.stage.stage import Stage
from support.towers import TwoTowers

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_gradient_of_the_cut_layers_weight_is_refused_and_the_right_one_named():
    stage = Stage(nn.Linear(64, 128), index=0)
    stage.forward(torch.randn(512, 64))
    with pytest.raises(GradientMismatch) as refusal:
        stage.backward(torch.randn(64, 128))
    text = str(refusal.value)
    assert "[64, 128]" in text
    assert "[512, 128]" in text
    assert "with respect to the activation" in text


@pytest.mark.parametrize(
    "gradient",
    [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 2), (torch.zeros(2, 3),), {"y": torch.zeros(2, 3)}, 1.0],
    ids=["dtype", "shape", "tuple", "dict", "number"],
)
def test_a_gradient_that_does_not_match_the_activation_is_refused(gradient):
    stage = Stage(nn.Linear(4, 3))
    stage.forward(torch.zeros(2, 4))
    with pytest.raises(GradientMismatch):
        stage.backward(gradient)


def test_an_unused_output_gets_no_gradient():
    stage = Stage(TwoTowers())
    x = {"towers": (torch.randn(2, 4, requires_grad=True),) * 2, "mask": None, "flag": None}
    stage.forward(x)
    stage.backward({"towers": (None, torch.ones(2, 4)), "mask": None, "flag": None, "none": None})
    weights = stage.state_dict()
    parameters = dict(stage._body.named_parameters())
    assert weights.keys() == {"0.left.weight", "0.left.bias", "0.right.weight", "0.right.bias"}
    assert parameters["0.left.weight"].grad is None
    assert parameters["0.right.weight"].grad is not None


def test_outputs_whose_names_look_alike_get_their_own_gradients():
    class Alike(nn.Module):
        def forward(self, x: Tensor) -> dict:
            return {"a.b": x * 2, "a": {"b": x * 3}, "['a']": {"b": x * 5}}

    stage, one = Stage(Alike()), torch.ones(2)
    stage.forward(torch.zeros(2, requires_grad=True))
    gradient = stage.backward({"a.b": one, "a": {"b": 10 * one}, "['a']": {"b": 100 * one}})
    assert torch.equal(gradient, torch.full((2,), 532.0))
