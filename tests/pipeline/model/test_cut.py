"""A model is cut into stages between its layers; what cannot be cut is refused."""

import pytest
import torch
from torch import nn

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.cut import cut_model, first_trainable, make_segments


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 400))


def names(segments) -> list[tuple[str, ...]]:
    return [part.names for part in segments]


def test_a_cut_is_before_the_layer_of_its_number():
    segments = cut_model(model(), [1, 4])
    assert names(segments) == [("0",), ("1", "2", "3"), ("4",)]
    assert [(part.index, part.first_layer) for part in segments] == [(0, 0), (1, 1), (2, 4)]


def test_stages_are_balanced_by_parameters():
    assert names(cut_model(model(), "auto", 2)) == [("0", "1", "2", "3"), ("4",)]
    assert names(cut_model(model())) == [("0", "1", "2", "3", "4")]


def test_modules_that_are_stages_already_stay_as_they_are():
    assert names(cut_model([nn.Linear(2, 2), nn.Tanh()])) == [("0",), ("1",)]


def test_the_first_stage_that_trains_is_found():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert first_trainable(cut_model([frozen, nn.Tanh(), nn.Linear(2, 2)])) == 2
    with pytest.raises(ModelRefused, match="nothing to train"):
        first_trainable(cut_model([frozen]))


class OwnWeight(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.ones(1))


def repeated() -> nn.Sequential:
    layer = nn.Linear(2, 2)
    return nn.Sequential(layer, layer)


@pytest.mark.parametrize(
    ("made", "cut", "stages", "reason"),
    [
        (model(), [5], None, "5 is out of range. The model has 5 layers"),
        (nn.Sequential(nn.Linear(2, 2)), [2], None, "2 is out of range. The model has 1 layer, so it cannot be cut"),
        (nn.Sequential(nn.Linear(2, 2), nn.Tanh()), [2], None, "The model has 2 layers, so a cut is before layer 1. "),
        (model(), None, 6, "model.stages = 6, but the model has 5 layers"),
        (nn.Linear(2, 2), None, None, "the model is of type Linear; expected an nn.Sequential"),
        (OwnWeight(), None, None, "scale belong to the model itself"),
        (repeated(), None, None, "the same module stands twice"),
        ([nn.Tanh(), 7], None, None, "some are not torch modules"),
        ([nn.Tanh()], [1], None, "given as 1 ready stages: leave model.cut"),
    ],
    ids=range(9),
)
def test_a_model_that_cannot_be_cut_is_refused(made, cut, stages, reason):
    with pytest.raises(ModelRefused, match=reason):
        cut_model(made, cut, stages)


@pytest.mark.parametrize("stages", [None, 2])
def test_a_layer_without_its_sizes_is_refused_with_the_name_of_its_weight(stages):
    """`nn.LazyLinear` ended as "a bug in stageline"."""
    with pytest.raises(ModelRefused, match=r"^2\.weight .*nn\.Linear"):
        cut_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LazyLinear(2)), None, stages)


def test_a_model_on_the_meta_device_is_refused_unless_its_weights_are_in_files():
    def make():
        with torch.device("meta"):
            return model()

    with pytest.raises(ModelRefused, match=r"^0\.weight .*meta.*model\.weights"):
        make_segments(make, seed=0)
    assert make_segments(make, seed=0, stored=True)


class CountingLinear(nn.Linear):
    """A layer that counts its forwards, and keeps the number in its `state_dict()` as `kind` makes it."""

    def __init__(self, kind) -> None:
        super().__init__(4, 4)
        self._kind = kind

    def get_extra_state(self):
        return self._kind(count=3) if self._kind is dict else torch.tensor([3])

    def set_extra_state(self, state) -> None:
        pass


def test_state_that_is_no_tensor_is_refused_by_its_name_when_the_model_is_cut():
    """A dict of get_extra_state ended in an AttributeError."""
    with pytest.raises(ModelRefused, match=r"^1\._extra_state .* is of type dict, .* tensors alone.* get_extra_state"):
        cut_model(nn.Sequential(nn.Linear(4, 4), CountingLinear(dict)), [1])
    (_, second) = cut_model(nn.Sequential(nn.Linear(4, 4), CountingLinear(torch.tensor)), [1])
    assert "1._extra_state" in second.weight_names
