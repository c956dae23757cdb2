"""Which layers a plan taps, on which stages."""

import pytest
from torch import nn

from stageline.pipeline.model.cut import cut_model
from stageline.pipeline.model.plan_stage import tapped_layers
from stageline.pipeline.plan import PlanRefused
from support.small_plans import plan

SEGMENTS = cut_model(nn.Sequential(*(nn.Linear(2, 2) for _ in range(12))), [4, 11])


def test_layers_are_matched_by_name_and_listed_by_stage_in_the_models_order() -> None:
    assert tapped_layers(plan(taps__layers=["1*", "3", "0"]), SEGMENTS) == {0: ("0", "1", "3"), 1: ("10",), 2: ("11",)}
    assert tapped_layers(plan(taps__layers=["11"]), SEGMENTS) == {2: ("11",)}
    assert tapped_layers(plan(), SEGMENTS) == {}


def test_each_pattern_that_matches_nothing_is_named_with_names_that_are_near() -> None:
    with pytest.raises(PlanRefused) as refused:
        tapped_layers(plan(taps__layers=["3", "12", "4.weight"]), SEGMENTS)
    [error] = refused.value.errors
    assert (error.key, error.value) == ("taps.layers", '["3", "12", "4.weight"]')
    assert error.reason == (
        'no layer of the model matches "12"; layers have names such as 2, 1, 11, 10; no layer of the model matches '
        '"4.weight"; it names a part of layer 4, and only what whole layers return is stored'
    )
