"""A module of which a stage has a copy must not lead to the original: the copy would compute with its weights."""

import weakref
from collections.abc import Callable
from functools import partial

import pytest
from torch import Tensor, nn

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.cut import cut_model


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(2, 2)

    def act(self, x: Tensor) -> Tensor:
        return self.w(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class Plain:
    """An object that a module has."""

    def __init__(self, of: object) -> None:
        self.of = of


REFERENCES: dict[str, Callable[[Shared], object]] = {
    "bound method": lambda shared: shared.act,
    "partial": lambda shared: partial(shared.w),
    "closure": lambda shared: lambda x: shared.w(x),
    "list": lambda shared: [[shared.w]],
    "object": lambda shared: Plain({"of": shared.w.weight}),
    "weak reference": lambda shared: weakref.ref(shared.w),
    "same memory": lambda shared: shared.w.weight.data.T,
}


@pytest.mark.parametrize("way", REFERENCES)
def test_a_module_that_leads_to_what_its_copy_would_not_have_is_refused(way: str) -> None:
    """`self.fn = self._f` computed with the other stage's weights, which are never updated there; nothing said so."""
    shared = Shared()
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(shared), nn.Linear(2, 2), nn.Sequential(shared))
    shared.register_forward_hook(lambda module, x, y: None)
    shared.fn = nn.functional.relu
    assert len(cut_model(model, [2])) == 2
    shared.fn = REFERENCES[way](shared)
    with pytest.raises(ModelRefused, match=r"parameter, 1.0.w.* but fn of 3.0, of type Shared, leads to the original"):
        cut_model(model, [2])
    assert len(cut_model(model, [1])) == 2
    del shared.fn
    shared.register_forward_hook(lambda module, x, y: shared.act(y))
    with pytest.raises(ModelRefused, match=r"_forward_hooks of 3.0, of type Shared, leads to the original"):
        cut_model(model, [2])


def test_a_module_that_has_no_shared_parameter_but_leads_to_one_is_refused() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(nn.Linear(2, 2)), nn.Sequential(shared))
    model[2].peer = [shared]
    with pytest.raises(ModelRefused, match=r"peer of 2, of type Sequential, leads to the original"):
        cut_model(model, [1])
