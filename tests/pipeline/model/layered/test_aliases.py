"""A module that a model has under several names is one layer, and its weights have all of the names."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline import Line, traced
from support.whole_models import ADAM, WholeModel, mean_loss, train_whole

pytestmark = pytest.mark.usefixtures("one_thread")


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.linear(x)).relu())


class Aliased(nn.Module):
    """Calls the first block by another name, and has one for a part of the second and for the head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(4, 8), nn.ModuleList([NormedBlock(), NormedBlock()])
        self.first, self.inner = self.blocks[0], self.blocks[1].linear
        self.head = nn.Linear(8, 3)
        self.tail = nn.ModuleList([self.head])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x))
        for block in self.blocks[1:]:
            x = block(x)
        return self.tail[0](x)


LAYERS = ["stem", "blocks.0", "blocks.1", "inner", "head"]


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


@pytest.mark.parametrize("cut", [["blocks.0"], ["blocks.0", "blocks.1", "head"]])
def test_a_module_of_several_names_trains_as_in_the_plain_loop_and_its_weights_have_all_of_them(cut: list[str]) -> None:
    """Its calls were not seen, so that the model had no layer, and its buffers would have been in two stages."""
    whole = WholeModel(Aliased, batch, ("", *LAYERS[1:]), {})
    state, losses = train_whole(whole, 3, 2)
    layers = traced(whole.made(), torch.randn(2, 4))
    assert layers.names == LAYERS
    options: dict[str, Any] = {"loss": mean_loss, "optimizer": ADAM, "microbatches": 2, "workers": "inline"}
    with Line(layers, cut=cut, **options) as line:
        assert [line.step(x, y).item() for x, y in whole.batches(3)] == losses
    trained = line.state_dict()
    assert trained.keys() == state.keys()
    assert all(torch.equal(trained[name], value) for name, value in state.items())
