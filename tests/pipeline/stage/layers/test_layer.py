"""A layer of several modules: its state has the unsplit model's names, and is the model's own."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from stageline.pipeline.stage.layers.layer import BoundLayer, HeldTensor
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")
SGD = partial(torch.optim.SGD, lr=0.5)


class Scaled(nn.Module):
    """Two modules, and a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.BatchNorm1d(3)})
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return compute(x, self.inner["a"], self.scale, self.inner["b"], self.shift)


def compute(x: Tensor, a: nn.Module, scale: Tensor, b: nn.Module, shift: Tensor) -> Tensor:
    return b(a(x) * scale) + shift


def bound(model: Scaled) -> BoundLayer:
    held = {key: HeldTensor(model, key) for key in ("scale", "shift")}
    a, b = model.inner["a"], model.inner["b"]
    return BoundLayer(compute, {"inner.a": a, "scale": held["scale"], "inner.b": b, "shift": held["shift"]})


def stage(model: Scaled, *, stash_weights: bool = False) -> Stage:
    return Stage(
        [bound(model), nn.Linear(3, 1)],
        optimizer=SGD,
        loss=nn.functional.mse_loss,
        settings=StageSettings(names=("inner", "head"), stash_weights=stash_weights),
    )


def train(stage: Stage) -> None:
    stage.forward(torch.arange(12.0).reshape(4, 3), torch.zeros(4, 1))
    stage.backward()
    stage.update()


def test_its_state_is_the_models_own_under_the_models_names():
    model = Scaled()
    trained = stage(model)
    train(trained)
    found = {name: value for name, value in trained.state_dict().items() if not name.startswith("head")}
    assert found.keys() == model.state_dict().keys()
    assert all(value.data_ptr() == model.state_dict()[name].data_ptr() for name, value in found.items())
    assert not torch.equal(model.scale, Scaled().scale)


@pytest.mark.parametrize("stash_weights", [False, True])
def test_a_snapshot_of_it_restores_the_same_bits(stash_weights):
    """With weight stashing a forward reads copies, in place of the held tensors too."""
    first, second = (stage(Scaled(), stash_weights=stash_weights) for _ in range(2))
    train(first)
    second.restore(first.snapshot())
    train(first)
    train(second)
    assert all(torch.equal(second.state_dict()[name], value) for name, value in first.state_dict().items())
    third = stage(Scaled())
    third.load_state_dict({name: value.clone() for name, value in first.state_dict().items()})
    assert all(torch.equal(third.state_dict()[name], value) for name, value in first.state_dict().items())


def test_it_computes_what_the_module_computes():
    torch.manual_seed(1)
    x, model = torch.randn(5, 3), Scaled()
    assert torch.equal(bound(Scaled())(x), model(x))
