"""A model is cut by what its layers cost: evenly, and so that each stage has room."""

import pytest

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.layer_costs import CutWish, LayerCost, chosen_edges

# The first layer is large and quick, the third small and slow.
COSTS = [
    LayerCost(parameters, nanoseconds, {f"weights {layer}": 4 * parameters}, {}, {layer: 10}, {layer + 100: 5})
    for layer, (parameters, nanoseconds) in enumerate([(100, 1), (20, 2), (20, 50), (20, 2)])
]


def one_each(stages: int) -> list[int]:
    """1F1B: the first stage holds as many microbatches as there are stages, the last holds one."""
    return list(range(stages, 0, -1))


def test_time_and_parameters_give_different_cuts() -> None:
    assert chosen_edges(COSTS, CutWish(2, "parameters"), one_each) == [0, 1, 4]
    assert chosen_edges(COSTS, CutWish(2, "time"), one_each) == [0, 2, 4]


def test_the_best_of_those_that_fit_is_taken() -> None:
    """The first two layers would take 480 bytes, and two microbatches of 25."""
    assert chosen_edges(COSTS, CutWish(2, "time", 530), one_each) == [0, 2, 4]
    assert chosen_edges(COSTS, CutWish(2, "time", 529), one_each) == [0, 1, 4]


def test_where_none_fits_the_best_is_told_and_how_many_stages_would_fit() -> None:
    large = [LayerCost(1, 1, {f"weights {layer}": 100}) for layer in range(5)]
    with pytest.raises(ModelRefused, match=r"model\.cut = \[2\], the stages take 200, 300 bytes; stage 1, of layers"):
        chosen_edges(large, CutWish(2, "parameters", 120), one_each)
    with pytest.raises(ModelRefused, match=r"At least 300 is needed; model\.stages = 5 would fit"):
        chosen_edges(large, CutWish(2, "parameters", 120), one_each)
    with pytest.raises(ModelRefused, match="no other number of stages fits"):
        chosen_edges(large, CutWish(2, "parameters", 99), one_each)
    busy = [LayerCost(1, 1, saved={layer: 100}) for layer in range(2)]  # fewer microbatches are under way in one stage
    with pytest.raises(ModelRefused, match=r"model\.stages = 1 would fit"):
        chosen_edges([*busy, LayerCost(1, 1)], CutWish(2, "parameters", 200), lambda stages: [stages**3] * stages)


def test_what_layers_share_is_in_one_stage_once() -> None:
    tied = [LayerCost(1, 1, {"weights table": 100}) for _ in range(3)]
    assert chosen_edges(tied, CutWish(2, "parameters", 100), one_each) == [0, 1, 3]


def test_asynchronous_stages_but_the_last_keep_versions_of_what_they_train() -> None:
    trained = [LayerCost(1, 1, {f"weights {layer}": 100}, {str(layer): 100}) for layer in range(2)]
    chosen_edges(trained, CutWish(2, "parameters", 300, stashes=True), one_each)
    with pytest.raises(ModelRefused, match="the stages take 300, 100 bytes"):
        chosen_edges(trained, CutWish(2, "parameters", 299, stashes=True), one_each)
