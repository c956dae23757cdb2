"""What a stage sends shares no memory with what will be written to."""

import pytest
import torch
from torch import Tensor, nn

from stageline.pipeline.errors import StageError
from stageline.pipeline.stage.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")


class Aliasing(nn.Module):
    """Gives back its input, a view of it, its parameter and its buffer: none may be sent as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, x[:, 1:], self.weight, self.kept


def test_what_shares_memory_with_weights_or_input_is_copied_before_it_is_sent():
    module, x = Aliasing(), torch.randn(2, 3, requires_grad=True)
    sent = Stage(module).forward(x)
    kept = [t.detach().clone() for t in sent]
    with torch.no_grad():
        for tensor in (x, module.weight, module.kept):
            tensor.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip(sent, kept, strict=True))


@pytest.mark.parametrize("twice", [lambda h: (h, h), lambda h: {"h": h, "head": h[:, :2]}], ids=["same", "slice"])
def test_memory_that_would_be_sent_twice_is_refused(twice):
    # They would arrive apart: an in-place layer would write to one alone, and gradients be added in another order.
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return twice(x * 2)

    with pytest.raises(StageError, match="returns the same memory twice"):
        Stage(Twice()).forward(torch.randn(3, 4, requires_grad=True))


def test_parts_of_one_tensor_that_do_not_overlap_may_be_sent():
    class Parts(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (x * 2).chunk(2, dim=1)

    assert len(Stage(Parts()).forward(torch.randn(3, 4))) == 2
