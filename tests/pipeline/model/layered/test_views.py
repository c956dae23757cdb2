"""A tensor and a view of it cross a cut as one where the bits stay, and are refused where they would not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline import Line, ModelRefused, traced
from stageline.pipeline.model.cut import cut_model
from support.whole_models import ADAM, WholeModel, mean_loss, train_whole

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {"loss": mean_loss, "optimizer": ADAM, "microbatches": 2, "workers": "inline"}


class ViewBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.head = (nn.Linear(4, 4) for _ in range(4))


class ViewResidual(ViewBlocks):
    """The second block has a view of what the first one gives; the rest has that itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        wide = x.view(-1, 1, 4).transpose(1, 2)
        y = self.second(wide.squeeze(2))
        return self.head(self.third(y + x) * x)


class ViewMasked(ViewBlocks):
    """Two views of a mask, and the mask itself, are used in each block."""

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).float()
        row, column, part = mask.unsqueeze(1), mask.view(-1, 4, 1), mask.split(2, 1)[0]
        for block in (self.first, self.second, self.third):
            x = block(x * mask) + (row @ column).squeeze(1) + part.sum(1, keepdim=True)
        return self.head(x)


class NamedOutput(dict[str, Tensor]):
    """A mapping with its keys as attributes, as transformers' outputs are."""

    __getattr__ = dict.__getitem__


class ViewRemembering(ViewBlocks):
    """Returns a detached value of the first block, which the second and third ones use."""

    def forward(self, x: Tensor) -> NamedOutput:
        x = self.first(x).tanh()
        kept = x.detach()
        return NamedOutput(logits=self.head(self.third(self.second(x) + x)), kept=kept)


class ViewHalves(ViewBlocks):
    """Two views of a value that nothing else uses later."""

    def forward(self, x: Tensor) -> Tensor:
        x = (self.first(x) > 0).float()
        one, other = x[:, :2], x.view(-1, 2, 2)
        x = self.second(x)
        return self.head(self.third(x + other.sum(1).sum(1, keepdim=True)) + one.sum(1, keepdim=True))


class ViewSilent(ViewBlocks):
    """Two views without a gradient of a value that has one, and that nothing else uses later."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        one, other = x.detach()[:, :2], x.detach().view(-1, 2, 2)
        x = self.second(x)
        return self.head(self.third(x + other.sum(1).sum(1, keepdim=True)) + one.sum(1, keepdim=True))


def rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4, generator=generator), torch.randint(4, (6,), generator=generator)


@pytest.mark.parametrize("kind", [ViewResidual, ViewMasked, ViewRemembering, ViewHalves, ViewSilent])
def test_views_are_derived_where_they_are_used_and_every_cut_trains_to_the_bits(kind: type[nn.Module]) -> None:
    whole = WholeModel(kind, rows, ("", "second", "third", "head"), {})
    state, losses = train_whole(whole, 2, 2)
    layers = traced(whole.made(), torch.ones(2, 4))
    assert not [layer.no_cut for layer in layers.bound if layer.no_cut]
    with Line(layers, cut=["second", "third", "head"], **OPTIONS) as line:
        assert [line.step(x, y).item() for x, y in whole.batches(2)] == losses
        x = whole.batches(1)[0][0]
        scores: Any = line.predict(x)
    assert all(torch.equal(value, state[name]) for name, value in line.state_dict().items())
    model = whole.made().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        wanted: Any = [model(part) for part in x.split(3)]
    if isinstance(scores, dict):
        assert torch.equal(scores["kept"], torch.cat([each["kept"] for each in wanted]))
    else:
        assert torch.equal(scores, torch.cat(wanted))


class ViewBetween(ViewBlocks):
    """Uses a value between a view of it and the layer that has the view: autograd would add up in another order."""

    def __init__(self, copy: bool) -> None:
        super().__init__()
        self.copy = copy

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        turned = x.view(-1, 1, 4)
        y = x.tanh()
        return self.head(self.second((turned.clone() if self.copy else turned).squeeze(1)) + x * y)


@pytest.mark.parametrize("where", [{"cut": ["second"]}, {"stages": 3}])
def test_a_cut_that_a_tensor_and_a_view_of_it_would_cross_is_refused(where: dict[str, Any]) -> None:
    reason = r"no stage can begin with second: .*squeeze.dim in .*test_views.py, line \d+\) and linear.*clone"
    with pytest.raises(ModelRefused, match=reason):
        cut_model(traced(ViewBetween(copy=False), torch.ones(2, 4)), **where)
    assert cut_model(traced(ViewBetween(copy=True), torch.ones(2, 4)), **where)
