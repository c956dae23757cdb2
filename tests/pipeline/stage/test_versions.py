"""Weight stashing: a backward uses the weights that its forward used."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from stageline.pipeline.stage.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")


def test_backward_uses_the_weights_that_forward_used():
    # PipeDream's weight stashing: two forwards, an update between their backwards.
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reference = copy.deepcopy(module)
    stage = Stage(module, optimizer=partial(torch.optim.SGD, lr=1.0), stash_weights=True)
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
