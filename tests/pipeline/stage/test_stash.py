"""The stash holds each forward until its backward, once."""

import pytest
import torch
from torch import Tensor, nn

from stageline.pipeline.errors import GradientMismatch, StageError
from stageline.pipeline.stage.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")


def test_microbatches_in_flight_go_backward_in_any_order():
    stage = Stage(nn.Linear(4, 4))
    x = [torch.randn(2, 4, requires_grad=True) for _ in range(3)]
    y = [stage.forward(each) for each in x]
    assert stage.in_flight == 3
    gradients = {m: stage.backward(torch.ones_like(y[m]), step=0, microbatch=m) for m in (1, 0, 2)}
    assert stage.in_flight == 0
    assert all(gradients[m].shape == x[m].shape for m in gradients)


def test_backward_without_a_gradient_is_for_a_loss_alone():
    stage = Stage(nn.Linear(4, 3))
    stage.forward(torch.zeros(2, 4))
    with pytest.raises(GradientMismatch, match="not a loss"):
        stage.backward()


def test_backward_without_a_forward_says_so():
    with pytest.raises(StageError, match="call forward first"):
        Stage(nn.Linear(4, 3), index=2).backward()


def test_the_same_microbatch_twice_in_flight_is_refused():
    stage = Stage(nn.Linear(4, 3))
    stage.forward(torch.zeros(2, 4), step=3, microbatch=1)
    with pytest.raises(StageError, match="microbatch 1 of step 3"):
        stage.forward(torch.zeros(2, 4), step=3, microbatch=1)


def test_a_hook_that_writes_to_the_gradient_of_the_loss_changes_one_microbatch_alone():
    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = (output - target).square().mean()
        value.register_hook(lambda gradient: gradient.mul_(2))
        return value

    layer = nn.Linear(3, 1)
    stage = Stage(layer, loss=loss)
    gradients = []
    for microbatch in range(3):
        stage.forward(torch.ones(2, 3), torch.zeros(2, 1), microbatch=microbatch, share=0.5)
        stage.backward()
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad.clone())
    assert torch.equal(gradients[1], 2 * gradients[0])
    assert torch.equal(gradients[2], 3 * gradients[0])
