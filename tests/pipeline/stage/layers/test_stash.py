"""The stash holds each forward until its backward, once: inputs are nodes of its graph, gradients fit its outputs."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline.pipeline.errors import GradientMismatch, StageError
from stageline.pipeline.stage.stage import Stage
from support.towers import TwoTowers

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


def test_backward_without_a_forward_is_refused():
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


class StrideRecorder(nn.Module):
    """Notes the strides of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.stride())
        return x * 2


def test_an_input_that_is_not_owned_is_never_written_to():
    x = torch.tensor([-1.0, 1.0])
    Stage(nn.ReLU(inplace=True)).forward(x)
    assert torch.equal(x, torch.tensor([-1.0, 1.0]))


def test_expanded_and_channels_last_inputs_keep_their_layout():
    expanded = torch.randn(1, 4).expand(3, 4)
    permuted = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    recorder = StrideRecorder()
    stage = Stage(recorder)
    for x in (expanded, permuted):
        stage.forward(x)
    assert recorder.seen == [expanded.stride(), permuted.stride()]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_gradient_keeps_the_layout_in_which_it_arrives(cut):
    # A leaf's .grad is copied to the leaf's own strides; SiLU's backward takes another path then, with other bits.
    class Transpose(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(1, 2)

    def model() -> list[nn.Module]:
        torch.manual_seed(3)
        return [nn.Linear(5, 7), nn.SiLU(), Transpose(), nn.Linear(9, 3)]

    x, target = torch.randn(4, 9, 5), torch.randn(4, 7, 3)
    whole = nn.Sequential(*model())
    functional.mse_loss(whole(x), target).backward()
    front = Stage(model()[:cut])
    back = Stage(model()[cut:], index=1, first_layer=cut, loss=functional.mse_loss)
    back.forward(front.forward(x), target)
    front.backward(back.backward())
    gradients = [p.grad for stage in (front, back) for p in stage._body.parameters()]
    assert all(torch.equal(p.grad, g) for p, g in zip(whole.parameters(), gradients, strict=True))


def test_a_cut_after_a_chunk_keeps_the_gaps_in_memory():
    half = torch.randn(4, 6, 5).chunk(2, dim=1)[0]
    recorder = StrideRecorder()
    Stage(recorder).forward(half)
    assert recorder.seen == [half.stride()]


def test_the_gradient_of_the_cut_layers_weight_is_refused_and_the_right_one_named():
    stage = Stage(nn.Linear(64, 128), index=0)
    stage.forward(torch.randn(512, 64))
    with pytest.raises(GradientMismatch) as refusal:
        stage.backward(torch.randn(64, 128))
    text = str(refusal.value)
    assert "[64, 128]" in text
    assert "[512, 128]" in text
    assert "with respect to the activation" in text


@pytest.mark.parametrize(
    "gradient",
    [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 2), (torch.zeros(2, 3),), {"y": torch.zeros(2, 3)}, 1.0],
    ids=["dtype", "shape", "tuple", "dict", "number"],
)
def test_a_gradient_that_does_not_match_the_activation_is_refused(gradient):
    stage = Stage(nn.Linear(4, 3))
    stage.forward(torch.zeros(2, 4))
    with pytest.raises(GradientMismatch):
        stage.backward(gradient)


def test_an_unused_output_gets_no_gradient():
    stage = Stage(TwoTowers())
    x = {"towers": (torch.randn(2, 4, requires_grad=True),) * 2, "mask": None, "flag": None}
    stage.forward(x)
    stage.backward({"towers": (None, torch.ones(2, 4)), "mask": None, "flag": None, "none": None})
    weights = stage.state_dict()
    parameters = dict(stage._body.named_parameters())
    assert weights.keys() == {"0.left.weight", "0.left.bias", "0.right.weight", "0.right.bias"}
    assert parameters["0.left.weight"].grad is None
    assert parameters["0.right.weight"].grad is not None


def test_outputs_whose_names_look_alike_get_their_own_gradients():
    class Alike(nn.Module):
        def forward(self, x: Tensor) -> dict:
            return {"a.b": x * 2, "a": {"b": x * 3}, "['a']": {"b": x * 5}}

    stage, one = Stage(Alike()), torch.ones(2)
    stage.forward(torch.zeros(2, requires_grad=True))
    gradient = stage.backward({"a.b": one, "a": {"b": 10 * one}, "['a']": {"b": 100 * one}})
    assert torch.equal(gradient, torch.full((2,), 532.0))
