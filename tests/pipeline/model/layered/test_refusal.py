"""Models that cannot be traced, or cut as often as is wished, are refused with the cause and the way out."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline import Line, ModelRefused, traced
from stageline.pipeline.model.cut import cut_model

pytestmark = pytest.mark.usefixtures("one_thread")


class OfDict(nn.Module):
    """Takes a dict as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.last(self.first(batch["x"]))


class InContexts(nn.Module):
    """Its first layers are in contexts of their own, and the one after them has modules."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.reduced, self.rest = nn.Linear(4, 4), nn.Linear(4, 4), OfDict()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.frozen(x)
        return self.rest({"x": torch.vmap(self.reduced)(x)})


def scripted() -> Any:
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.script(nn.Linear(4, 3))


LOSS, X = nn.functional.mse_loss, torch.randn(2, 4)


@pytest.mark.parametrize(
    ("model", "example", "said"),
    [
        (OfDict(), {"x": X}, r"unexpected keyword argument 'x'.* takes the dict itself gets \(\{\.\.\.\},\)"),
        (OfDict(), ({"x": X}, X), r"takes 2 positional arguments but 3 .* that takes it itself gets \(\[\.\.\.\],\)"),
        (nn.Bilinear(4, 4, 3), X, "missing 1 required positional argument.* several arguments gets a tuple, or a dict"),
        (nn.Linear(5, 3), X, r"mat1 and mat2 .* correct its forward$"),
        (scripted(), X, "^the model is compiled by torch.jit.* as it was before"),
        (nn.ModuleList([nn.ReLU(), scripted()]), X, r"^1 is compiled by torch\.jit"),
    ],
    ids=["dict", "tuple", "one of two", "wrong", "script", "script in it"],
)
def test_a_model_that_cannot_be_called_or_traced_is_refused_with_its_way_out(
    model: Any, example: Any, said: str
) -> None:
    with pytest.raises(ModelRefused) as refused:
        traced(model, example)
    refused.match(said.replace("$", r" \[SL201\]$"))


def test_a_dict_that_is_one_argument_is_given_in_a_tuple() -> None:
    model = OfDict()
    options: dict[str, Any] = {"loss": LOSS, "optimizer": torch.optim.SGD, "workers": "inline"}
    with Line(model, stages=2, microbatches=1, **options) as line:
        assert torch.equal(line.predict(({"x": X},)), model({"x": X}))


def test_too_many_stages_are_refused_with_what_makes_no_layer_and_what_may_be_divided() -> None:
    model = InContexts()
    with pytest.raises(ModelRefused) as refused:
        cut_model(traced(model, X), stages=4)
    for fact in (
        "the model has 1 layer: at most one stage each",
        "the forward calls frozen in a context of its own, such as torch.no_grad(), torch.autocast() or torch.vmap",
        "the forward calls reduced in a context",
        "within=['rest']) makes layers of what is in them",
    ):
        assert fact in str(refused.value)
    wider = traced(model, X, within=["rest"])
    with Line(wider, stages=2, microbatches=1, loss=LOSS, optimizer=torch.optim.SGD, workers="inline") as line:
        assert torch.equal(line.predict(X), model(X))


def test_a_batch_without_rows_is_evaluated_predicted_and_trained_as_nothing() -> None:
    """An nn.Sequential took it, a traced model refused it."""
    options: dict[str, Any] = {"loss": LOSS, "optimizer": torch.optim.SGD, "workers": "inline"}
    x, nothing, y = ({"x": X},), ({"x": X[:0]},), torch.zeros(2, 3)
    with Line(traced(OfDict(), x), stages=2, microbatches=2, **options) as line:
        state = line.state_dict()
        assert line.step(nothing, y[:0]).item() is None
        assert all(torch.equal(each, state[name]) for name, each in line.state_dict().items())
        assert line.evaluate([(x, y), (nothing, y[:0])]) == line.evaluate([(x, y)])
        assert line.predict(nothing).shape == (0, 3)  # type: ignore[union-attr]
