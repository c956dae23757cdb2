"""A block that a forward calls several times is a layer in each call, and the stages that call it share its weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stageline import Line, ModelRefused, traced
from stageline.pipeline.model.cut import cut_model
from support.whole_models import ADAM, WholeModel, mean_loss, train_whole

pytestmark = pytest.mark.usefixtures("one_thread")


class ReusedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.linear(x)).tanh()


class Reusing(nn.Module):
    """Calls one block three times, as ALBERT does, another twice, and a single operator again and again."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.one, self.other, self.checkpoints = ReusedBlock(), ReusedBlock().requires_grad_(False), checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in (self.one, self.one, self.other, self.one, self.other):
            x = self.norm(checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return self.last(x)


LAYERS = ["first", "one", "one@2", "other", "one@3", "other@2", "last"]
WHOLE = WholeModel(
    Reusing,
    lambda g: (torch.randn(8, 8, generator=g), torch.randint(3, (8,), generator=g)),
    ("", *LAYERS[1:]),
    {},
)


@pytest.mark.parametrize("cut", [["one@2"], ["one@2", "one@3", "last"], LAYERS[1:]])
def test_each_call_of_a_block_is_a_layer_and_every_cut_trains_to_the_bits(cut: list[str]) -> None:
    state, losses = train_whole(WHOLE, 3, 2)
    layers = traced(WHOLE.made(), torch.ones(2, 8))
    assert layers.names == LAYERS
    options: dict[str, Any] = {"loss": mean_loss, "optimizer": ADAM, "microbatches": 2, "workers": "inline"}
    with Line(layers, cut=cut, **options) as line:
        assert [line.step(x, y).item() for x, y in WHOLE.batches(3)] == losses
    trained = line.state_dict()
    assert trained.keys() == state.keys()
    assert all(torch.equal(trained[name], value) for name, value in state.items())


def test_a_block_that_is_computed_again_in_backward_has_the_seeds_of_its_calls() -> None:
    layers = traced(Reusing(checkpoints=True), torch.randn(2, 8))
    assert (layers.names, layers.difference) == (LAYERS, "")


def test_a_single_operator_that_is_called_several_times_is_no_layer() -> None:
    with pytest.raises(ModelRefused, match="the forward calls norm 6 times, and only a block of modules is a layer"):
        cut_model(traced(WHOLE.made(), torch.ones(2, 8)), ["norm"])
