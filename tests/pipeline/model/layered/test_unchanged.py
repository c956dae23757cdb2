"""Effects of a forward in Python are not in its graphs: they are refused or named, although the bits are equal."""

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn

from stageline import Line, ModelRefused, traced

LOSS = nn.functional.cross_entropy

pytestmark = pytest.mark.usefixtures("one_thread")


class SeldomWhole(nn.Module):
    """Leaves a layer out once in a while, so seldom that no comparison of two calls shows it."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.first, self.middle, self.last, self.draw = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.middle(x) if not self.training or self.draw() > 1e-9 else x)


class CallCounting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(4, 4), nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.first(x) if self.calls < 1000 else x)


class ActivationMean(nn.Module):
    """An average of activations, by an assignment, or by a write."""

    mean: Tensor

    def __init__(self, *, assigns: bool) -> None:
        super().__init__()
        self.first, self.last, self.assigns = nn.Linear(4, 4), nn.Linear(4, 3), assigns
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.assigns:
            self.mean = mean
        else:
            self.mean.copy_(mean)
        return self.last(x - mean)


@pytest.mark.parametrize(
    ("draw", "name"), [(random.random, "Python's random"), (lambda: numpy.random.rand(), "numpy.random")]
)
def test_a_forward_that_draws_from_pythons_generators_is_refused_unless_that_is_accepted(
    draw: Callable[[], float], name: str
) -> None:
    """A tenth of all calls left a layer out in the model's own training, and none did in that of its graphs."""
    layers = traced(SeldomWhole(draw), torch.randn(4, 4))
    with pytest.raises(ModelRefused, match=rf"SeldomWhole draws from {name}, .*torch\.rand.*accept_difference=True"):
        Line(layers, stages=2, loss=LOSS, optimizer=torch.optim.SGD, workers="inline")
    with Line(layers, stages=2, loss=LOSS, optimizer=torch.optim.SGD, workers="inline", accept_difference=True) as line:
        assert line.step(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)).item() is not None


def test_a_forward_that_draws_with_torch_or_only_has_attributes_is_accepted_without_a_word() -> None:
    assert traced(SeldomWhole(lambda: 1.0), torch.randn(4, 4)).difference == ""


def test_a_number_that_each_call_changes_is_named_in_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match="each call of the CallCounting changes calls, .* register a buffer"):
        layers = traced(CallCounting(), torch.randn(4, 4))
    assert layers.difference == ""
    with Line(layers, stages=2, loss=LOSS, optimizer=torch.optim.SGD, microbatches=4, workers="inline") as line:
        assert line.step(torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)).item() is not None  # 1 row in each


def test_a_buffer_that_is_assigned_is_refused_with_the_write_that_is_in_a_graph() -> None:
    assert (
        "the assignment of mean, which mean.copy_(...)"
        in traced(ActivationMean(assigns=True), torch.randn(4, 4)).difference
    )
    assert traced(ActivationMean(assigns=False), torch.randn(4, 4)).difference == ""
