"""Patterns of names say what is trained; all else is frozen, and what they cannot mean is refused by name."""

import pytest
import torch
from torch import nn

from stageline import Layer, Layers
from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.cut import cut_model, first_trainable
from stageline.pipeline.model.ties import ties_of


def model() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), inner, nn.Linear(4, 2))


def trained(made: nn.Module) -> list[str]:
    return [name for name, each in made.named_parameters() if each.requires_grad]


@pytest.mark.parametrize(
    ("patterns", "wanted", "first"),
    [
        (["2.1.*"], ["2.1.weight", "2.1.bias"], 1),
        (["*.bias"], ["0.bias", "2.0.bias", "2.1.bias", "3.bias"], 0),
        (["3.weight", "2.?.bias"], ["2.0.bias", "2.1.bias", "3.weight"], 1),
        (["[03].weight"], ["0.weight", "3.weight"], 0),
    ],
)
def test_what_a_pattern_matches_is_trained_and_nothing_else(patterns: list[str], wanted: list[str], first: int) -> None:
    made = model()
    segments = cut_model(made, [1, 3], trainable=patterns)
    assert trained(made) == wanted
    assert first_trainable(segments) == first


def test_a_pattern_trains_what_the_factory_has_frozen() -> None:
    made = model().requires_grad_(False)
    cut_model(made, [1], trainable=["3.bias"])
    assert trained(made) == ["3.bias"]


def test_without_patterns_the_factory_decides() -> None:
    made = model()
    made[0].requires_grad_(False)
    assert first_trainable(cut_model(made, [1, 3])) == 1
    assert trained(made) == ["2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias", "3.weight", "3.bias"]


def test_layers_made_of_several_modules_have_the_names_of_the_model() -> None:
    made = nn.ModuleDict({"wide": nn.Linear(4, 4), "tall": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    layers = [Layer(("wide", "tall"), lambda x, wide, tall: wide(x) + tall(x)), Layer("head")]
    cut_model(Layers(made, layers), [1], trainable=["tall.*"])
    assert trained(made) == ["tall.weight", "tall.bias"]


@pytest.mark.parametrize("pattern", ["0.weight", "3.weight"])
def test_a_parameter_of_several_stages_is_trained_under_each_of_its_names(pattern: str) -> None:
    made = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    made[3].weight = made[0].weight
    segments = cut_model(made, [1, 3], trainable=[pattern])
    assert ties_of(segments) == ((0, 2),)
    assert [part.trainable for part in segments] == [True, False, True]


def test_a_parameter_of_several_stages_that_is_frozen_is_no_tie() -> None:
    made = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    made[3].weight = made[0].weight
    segments = cut_model(made, [1, 3], trainable=["2.*"])
    assert ties_of(segments) == ()
    assert [part.trainable for part in segments] == [False, True, False]


@pytest.mark.parametrize(
    ("patterns", "reason"),
    [
        (["4.*"], r'model.trainable: no parameter of the model matches "4.\*". Parameters have names such as '),
        (["2.1.wight"], r'matches "2.1.wight". Parameters have names such as 2.1.weight'),
        (["2.1"], r'matches "2.1". It names a module: write "2.1.\*" for its parameters'),
        (["2.*", "1.*", "5.*"], r'"1.\*"\. Parameters .*; no parameter of the model matches "5.\*"'),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_and_nothing_has_changed(patterns: list[str], reason: str) -> None:
    made = model()
    with pytest.raises(ModelRefused, match=reason):
        cut_model(made, [1], trainable=patterns)
    assert len(trained(made)) == 8


def test_a_model_without_parameters_has_nothing_to_match() -> None:
    with pytest.raises(ModelRefused, match=r'matches "\*". The model has no parameters'):
        cut_model(nn.Sequential(nn.ReLU(), nn.ReLU()), [1], trainable=["*"])


def test_whole_numbers_cannot_be_trained() -> None:
    made = model()
    made[0].codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ModelRefused, match=r"model.trainable: 0.codes is int8 \[3\], and only numbers with a fraction"):
        cut_model(made, [1], trainable=["0.*"])
    assert trained(made) == [name for name, _ in made.named_parameters() if name != "0.codes"]
    cut_model(made, [1], trainable=["0.weight"])
    assert trained(made) == ["0.weight"]
