"""A model is of a family if it computes as the family's own does; tests/integration/test_families.py has the bits."""

import pytest
import torch
from torch import Tensor, nn

from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.model.cut import cut_model
from stageline.pipeline.model.layered.layers import taken
from support.resnet import ResNet, resnet18


class Renamed(ResNet):
    """Computes as its base does."""


class Halved(ResNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_a_class_that_is_derived_from_a_known_one_is_cut_like_it():
    assert [len(part.names) for part in cut_model(Renamed(2, 1, 3), ["layer3", "fc"])] == [3, 3, 1]


def test_a_model_with_a_forward_of_its_own_is_refused():
    with pytest.raises(ModelRefused, match="the model is of type Halved, whose forward is not that of ResNet"):
        cut_model(Halved(2, 1, 3), ["layer3"])
    patched = resnet18(2)
    patched.forward = lambda x: x
    with pytest.raises(ModelRefused, match="the model is of type ResNet, whose forward is not that of ResNet"):
        cut_model(patched, ["layer3"])


def test_a_model_of_an_unknown_class_is_refused_with_the_nearest_families_and_the_way_out():
    with pytest.raises(
        ModelRefused, match=r"is of type MistralLM; .*MistralForC.*stageline.Layers.*docs/guides/models"
    ):
        cut_model(type("MistralLM", (nn.Bilinear,), {})(2, 2, 2))
    with pytest.raises(ModelRefused, match=r"is of type Bilinear; .*GPT2LMHeadModel.*stageline.Layers"):
        cut_model(nn.Bilinear(2, 2, 2))


def test_inputs_are_a_tensor_or_a_dict_of_what_the_model_takes():
    ids, mask = torch.ones(2, 3), torch.zeros(2, 3)
    assert taken(ids, ("ids", "mask")) == [ids, None]
    assert taken({"mask": mask, "ids": ids}, ("ids", "mask")) == [ids, mask]


@pytest.mark.parametrize("inputs", [{"mask": torch.ones(1)}, {"ids": torch.ones(1), "labels": None}, (torch.ones(1),)])
def test_other_inputs_are_refused(inputs):
    with pytest.raises(DataError, match=r"expected a tensor, ids, or a dict of it and any of mask.*labels"):
        taken(inputs, ("ids", "mask"))
