"""Parameters that several stages use: who has which copy, and who sends gradients to whom."""

import pytest
import torch
from torch import nn

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.cut import cut_model
from stageline.pipeline.model.ties import ties_of


def tied(*pairs: tuple[int, int], layers: int = 6) -> nn.Sequential:
    made = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(layers)))
    for earlier, later in pairs:
        made[later][0].weight = made[earlier][0].weight
    return made


def test_each_stage_has_a_copy_and_the_users_model_stays_as_it_is() -> None:
    model = tied((0, 5))
    first, last = (part.layers[0] for part in cut_model(model, [5]))
    assert first is model[0]
    assert model[5][0].weight is model[0][0].weight
    assert last[0].weight is not first[0].weight
    assert torch.equal(last[0].weight, first[0].weight)
    assert last[0].bias is model[5][0].bias


def test_what_one_stage_uses_twice_is_shared_once() -> None:
    first, last = cut_model(tied((0, 4), (4, 5)), [4])
    assert last.layers[0][0].weight is last.layers[1][0].weight
    assert (first.shared.own, last.shared.own) == ({"0.0.weight": "0.0.weight"}, {"0.0.weight": "4.0.weight"})


@pytest.mark.parametrize(
    ("pairs", "ties"),
    [
        ([(0, 5)], [(0, 5)]),
        ([(0, 3), (3, 5)], [(0, 3), (3, 5)]),
        ([(0, 1), (3, 4)], [(0, 1), (3, 4)]),
        ([(0, 5), (2, 3)], [(0, 2), (2, 3), (3, 5)]),
    ],
    ids=str,
)
def test_neighbours_among_the_stages_that_share_something_are_joined(
    pairs: list[tuple[int, int]], ties: list[tuple[int, int]]
) -> None:
    assert list(ties_of(cut_model(tied(*pairs), [1, 2, 3, 4, 5]))) == ties


def test_gradients_pass_through_stages_that_share_something_else() -> None:
    parts = cut_model(tied((0, 5), (2, 3)), [1, 2, 3, 4, 5])
    assert parts[2].shared.above == {"0.0.weight", "2.0.weight"}
    assert parts[2].shared.below == {"0.0.weight"}
    assert parts[2].shared.own == {"2.0.weight": "2.0.weight"}
    assert not parts[1].shared


def test_what_nothing_trains_is_copied_and_joins_no_stages() -> None:
    model = tied((0, 5))
    model[0][0].weight.requires_grad_(False)
    first, last = cut_model(model, [5])
    assert last.layers[0][0].weight is not first.layers[0][0].weight
    assert ties_of([first, last]) == ()


def test_a_module_whose_forward_was_replaced_cannot_be_copied() -> None:
    model = tied((0, 5))
    model[5][0].forward = model[5][0].forward
    with pytest.raises(ModelRefused, match=r"this Linear belongs to an earlier stage too, .* its forward was"):
        cut_model(model, [5])


def test_a_buffer_is_not_shared() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[1].running_mean = model[0].running_mean
    with pytest.raises(ModelRefused, match=r"share one buffer \(0.running_mean is 1.running_mean\)"):
        cut_model(model, [1])


def test_what_stages_share_counts_once() -> None:
    model = tied((0, 5), (2, 3), (3, 5))
    parts = cut_model(model, [1, 2, 3, 4, 5])
    assert sum(part.parameters for part in parts) == sum(each.numel() for each in model.parameters())


def test_asynchronous_stages_share_nothing_and_the_refusal_names_the_parameter_and_both_layers() -> None:
    parts = cut_model(tied((0, 5)), [1, 4])
    told = r"stages 0 and 2 share a parameter, 0.0.weight of layer 0 and 5.0.weight of layer 5, .* so that both layers"
    with pytest.raises(ModelRefused, match=told):
        ties_of(parts, "async")
