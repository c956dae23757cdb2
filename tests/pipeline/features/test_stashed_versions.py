"""Weight stashing: a backward uses the weights that its forward used."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from stageline.pipeline.errors import StageError
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")


def test_backward_uses_the_weights_that_forward_used():
    # PipeDream's weight stashing: two forwards, an update between their backwards.
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reference = copy.deepcopy(module)
    stage = Stage(module, optimizer=partial(torch.optim.SGD, lr=1.0), settings=StageSettings(stash_weights=True))
    x = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    g = torch.randn(2, 4)
    for step, each in enumerate(x):
        stage.forward(each, step=step, microbatch=0)
    got = []
    for step in range(2):
        got.append(stage.backward(g, step=step, microbatch=0))
        stage.update()
    for each, gradient in zip(x, got, strict=True):
        assert torch.equal(torch.autograd.grad(reference(each), each, g)[0], gradient)
    for p, q in zip(reference.parameters(), module.parameters(), strict=True):
        first, second = (torch.autograd.grad(reference(each), p, g)[0] for each in x)
        assert torch.equal(p - first - second, q)


class HoldsItsWeightTwice(nn.Module):
    """A layer that computes with its weight from a list, in which no version can stand for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.again = [self.linear.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.again[0].t()


def test_a_weight_that_is_read_from_a_list_is_refused_by_name():
    # Its gradient was left at the parameter and dropped, so the layer was never trained, and nothing said so.
    stage = Stage(
        [HoldsItsWeightTwice()], optimizer=partial(torch.optim.SGD, lr=1.0), settings=StageSettings(stash_weights=True)
    )
    stage.forward(torch.randn(2, 4), step=0, microbatch=0)
    with pytest.raises(StageError, match=r"^0\.linear\.weight was read other than as the attribute"):
        stage.backward(torch.ones(2, 4), step=0, microbatch=0)


class LastOutput(nn.Module):
    """The outputs of a recurrent module, without its state."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.recurrent(x)[0]


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_modules_whose_weights_torch_keeps_in_a_list_are_stashed(kind):
    module = LastOutput(kind(4, 4))
    reference = copy.deepcopy(module)
    stage = Stage([module], optimizer=partial(torch.optim.SGD, lr=1.0), settings=StageSettings(stash_weights=True))
    x, g = torch.randn(2, 3, 2, 4), torch.randn(3, 2, 4)
    for step in range(2):
        stage.forward(x[step], step=step, microbatch=0)
    for step in range(2):
        stage.backward(g, step=step, microbatch=0)
        stage.update()
    expected = list(reference.parameters())
    gradients = [torch.autograd.grad(reference(each), expected, g) for each in x]
    for before, first, second, after in zip(expected, *gradients, module.parameters(), strict=True):
        assert torch.equal(before - first - second, after)


class ZeroingSGD(torch.optim.SGD):
    """An optimizer that clears gradients by writing zeros to them."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


def test_an_optimizer_that_leaves_zeros_as_gradients_is_not_taken_for_a_second_reading():
    module = nn.Linear(4, 4)
    stage = Stage([module], optimizer=partial(ZeroingSGD, lr=1.0), settings=StageSettings(stash_weights=True))
    before = module.weight.detach().clone()
    for step in range(2):
        stage.forward(torch.ones(2, 4), step=step, microbatch=0)
        stage.backward(torch.ones(2, 4), step=step, microbatch=0)
        stage.update()
    assert torch.equal(module.weight, before - 2 - 2)
