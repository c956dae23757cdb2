"""Random numbers for what is split are refused, wherever they are drawn; those for what is whole are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from stageline.pipeline.stage.draws import DrawWatch, SplitDraw
from stageline.pipeline.stage.stage import Stage


class Functional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.5, self.training)


def stage_of(*layers: nn.Module, styles: dict[int, str]) -> Stage:
    DrawWatch(layers, {str(place): (layers[place], style) for place, style in styles.items()}, torch.device("cpu"))
    return Stage(layers, loss=lambda output, target: output.sum())


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), Functional(), nn.Sequential(nn.ReLU(), nn.Dropout(0.5))])
@pytest.mark.parametrize("ends", [True, False], ids=["until a layer with split rows", "until the stage's end"])
def test_a_dropout_after_a_layer_with_split_columns_is_refused(dropout: nn.Module, *, ends: bool) -> None:
    styles = {0: "colwise", 2: "rowwise"} if ends else {0: "colwise"}
    stage = stage_of(nn.Linear(4, 8), dropout, nn.Linear(8, 4), styles=styles)
    with pytest.raises(SplitDraw, match="for what 0 returns"):
        stage.forward(torch.ones(2, 4))
    stage.evaluate(torch.ones(2, 4))  # draws nothing


def test_a_dropout_before_and_after_split_layers_is_taken() -> None:
    layers = (nn.Dropout(0.5), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Dropout(0.5))
    stage = stage_of(*layers, styles={1: "colwise", 3: "rowwise"})
    assert stage.forward(torch.ones(2, 4)).shape == (2, 4)  # type: ignore[union-attr]
    assert stage.forward(torch.ones(2, 4)).shape == (2, 4)  # type: ignore[union-attr]
