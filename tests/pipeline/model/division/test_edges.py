"""A cut names layers by number or name; a name that is no layer's is refused with those that are near."""

import pytest
from torch import nn

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.cut import cut_model
from support.resnet import resnet18

# 0 conv1, 1 layer1.0, 2 layer1.1, 3 layer2.0, ..., 9 avgpool, 10 fc
CUTS = [
    ([1, 3], [0, 1, 3]),
    (["layer2"], [0, 3]),
    (["layer1.1", 4, "fc"], [0, 2, 4, 10]),
]


@pytest.mark.parametrize(("cut", "first_layers"), CUTS, ids=str)
def test_numbers_and_names_of_layers_and_of_what_contains_them_can_be_cut_at(cut, first_layers):
    assert [part.first_layer for part in cut_model(resnet18(2), cut)] == first_layers


def test_an_nn_sequential_is_cut_at_its_childrens_names():
    model = nn.Sequential()
    for name in ("stem", "body", "head"):
        model.add_module(name, nn.Linear(2, 2))
    assert [part.names for part in cut_model(model, ["body", "head"])] == [("stem",), ("body",), ("head",)]


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        (["layer1.7"], r'cut = \["layer1.7"\]: no layer is named layer1.7; layers have names such as layer1'),
        (["nothing"], "no layer is named nothing; layers have names such as conv1, layer1.0"),
        (["bn1"], "bn1 is computed together with the rest of layer conv1"),
        (["layer2.0.conv2"], "layer2.0.conv2 is computed together with the rest of layer layer2.0"),
        (["layer2.0.conv7"], "no layer is named layer2.0.conv7; layers have names such as layer2.0"),
        (["conv1"], "conv1 is the first layer"),
        (["fc", "layer2"], "layer2 is not after fc in the model"),
        (["layer1", 1], "1 is not after layer1 in the model"),
        ([11], "11 is out of range. The model has 11 layers"),
    ],
    ids=str,
)
def test_a_cut_that_does_not_fit_is_refused(cut, reason):
    with pytest.raises(ModelRefused, match=reason):
        cut_model(resnet18(2), cut)
