"""What a stage receives enters autograd as it lies in memory, and so does its gradient leave."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline.pipeline.stage.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")


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
