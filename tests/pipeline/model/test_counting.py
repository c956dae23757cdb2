"""Modules that count what they see are refused in a stage with replicas, by their names and with the ways out; so are
parameters that stages share."""

import pytest
from torch import nn

from stageline.pipeline.model.cut import cut_model
from stageline.pipeline.model.side_effects import demand_replicable
from stageline.pipeline.plan import PlanRefused
from support.small_plans import plan


def model() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), inner, nn.InstanceNorm1d(4), nn.LayerNorm(4))


def demand(made: nn.Module, **replicas: int) -> None:
    tables = {name.removeprefix("of_"): {"replicas": count} for name, count in replicas.items()}
    demand_replicable(plan(stage=tables, model__cut=[2], schedule__microbatches=8), cut_model(made, [2]))


def test_batch_norm_in_training_mode_is_refused_by_its_name() -> None:
    with pytest.raises(PlanRefused) as refused:
        demand(model(), of_1=2)
    assert [error.key for error in refused.value.errors] == ["stage.1.replicas"]
    assert "2.1, of type BatchNorm1d, counts statistics" in str(refused.value)
    assert "call eval() on it" in str(refused.value)


def test_batch_norm_in_evaluation_mode_and_of_other_stages_is_not() -> None:
    demand(model().eval(), of_0=2, of_1=3)
    demand(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), of_1=2)


def test_parameters_that_stages_share_are_refused_beside_replicas() -> None:
    made = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    made[3].weight = made[0].weight
    demand(made)
    with pytest.raises(PlanRefused, match="stages 0 and 1 share a parameter") as refused:
        demand(made, of_1=2)
    assert [error.key for error in refused.value.errors] == ["stage.1.replicas"]
