"""Batches as transformers' data collators make them: a dict whose `labels` are the targets."""

import re
from collections import UserDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline import DataError, Line

ADAM = partial(torch.optim.Adam, lr=0.01)

pytestmark = pytest.mark.usefixtures("one_thread")


class Masked(nn.Module):
    """The mean of the embeddings that the mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"].unsqueeze(-1)
        return (self.embedding(batch["input_ids"]) * mask).sum(1) / mask.sum(1)


def line(**options: Any) -> Line:
    torch.manual_seed(0)
    model = nn.Sequential(Masked(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    given = {"cut": [1], "loss": nn.functional.cross_entropy, "optimizer": ADAM, "microbatches": 2, "workers": "inline"}
    return Line(model, **{**given, **options})


def batches(name: str = "labels", kind: Any = dict) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randint, generator=generator)
    return [
        kind(
            input_ids=draw(0, 16, (6, 5)),
            attention_mask=torch.ones(6, 5, dtype=torch.int64),
            **{name: draw(0, 3, (6,))},
        )
        for _ in range(3)
    ]


def pairs() -> list[Any]:
    return [({name: each for name, each in batch.items() if name != "labels"}, batch["labels"]) for batch in batches()]


def fitted(of: list[Any], **options: Any) -> tuple[dict[str, Tensor], list[dict[str, float | None]], dict[str, float]]:
    with line() as trained:
        found = trained.fit(of, epochs=2, held_out=of[:2], evaluate_every="epoch", **options)
        return trained.state_dict(), [*found.evaluations.values()], trained.evaluate(of, **options)


@pytest.mark.parametrize(
    ("of", "options"),
    [(batches(), {}), (batches(kind=UserDict), {}), (batches("label"), {"targets": "label"})],
    ids=["dict", "a mapping of another class", "another key"],
)
def test_dicts_are_the_inputs_without_the_targets(of: list[Any], options: dict[str, Any]) -> None:
    weights, evaluations, measured = fitted(pairs())
    found = fitted(of, **options)
    assert (found[1], found[2]) == (evaluations, measured)
    assert all(torch.equal(found[0][name], each) for name, each in weights.items())


@pytest.mark.parametrize("taker", ["fit", "evaluate"])
def test_a_dict_without_the_targets_is_refused_with_its_keys(taker: str) -> None:
    with line() as trained, pytest.raises(DataError) as refused:
        getattr(trained, taker)(batches("answers"))
    assert re.search(r"batch 0 is a dict with input_ids, attention_mask, answers", str(refused.value))
    assert 'targets = "labels" is the key of its targets' in str(refused.value)
    assert f'{taker}(batches, targets="' in str(refused.value)


@pytest.mark.parametrize(
    "form",
    [
        lambda loss: loss + 1,
        lambda loss: sum([loss, loss * 2]),
        lambda loss: 0.5 * loss.mean(),
        lambda loss: loss[None],
    ],
    ids=["+ 1", "sum", "0.5 *", "[1]"],
)
def test_a_loss_may_be_any_expression_of_one_number(form: Any) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return form(nn.functional.cross_entropy(outputs, targets))  # type: ignore[no-any-return]

    with line(loss=loss, cut=[1], microbatches=1) as trained:
        model = nn.Sequential(Masked(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        model.load_state_dict(trained.state_dict())
        optimizer = ADAM(model.parameters())
        for x, y in pairs():
            value = loss(model(x), y)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert trained.fit(batches()).loss == value.item()
        assert all(torch.equal(trained.state_dict()[name], each) for name, each in model.state_dict().items())
        assert trained.evaluate(batches())["loss"] > 0
