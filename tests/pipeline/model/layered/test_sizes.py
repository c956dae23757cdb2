"""A traced model takes the rows and the lengths of text that its forward treats alike, and refuses others by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline import DataError, Line, traced
from support.whole_models import ADAM, WholeModel, mean_loss, train_whole

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {"loss": mean_loss, "optimizer": ADAM, "workers": "inline"}


class Asking(nn.Module):
    """`ask` takes what the first layer gives."""

    def __init__(self, ask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.ask = nn.Linear(3, 3), nn.Linear(3, 3), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.ask(self.first(x)))


@pytest.mark.parametrize(
    ("ask", "taken", "refused", "reason"),
    [
        (lambda x: x * 2 if x.shape[0] < 5 else x, 4, 5, "for microbatches of 1 to 4 rows: with more .* smaller"),
        (lambda x: x * 2 if x.shape[0] > 2 else x, 9, 2, "for microbatches of 3 rows or more: with fewer"),
        (lambda x: x * 2 if x.shape[0] % 2 else x, 3, 5, "for microbatches of 3 rows, since its forward needs"),
        (lambda x: x + sum(range(len(x))), 3, 4, "4 rows in a microbatch.* of 3 rows, since"),
    ],
)
def test_rows_that_the_forward_does_not_treat_as_the_examples_are_refused(
    ask: Callable[[Tensor], Tensor], taken: int, refused: int, reason: str
) -> None:
    torch.manual_seed(0)
    model = Asking(ask)
    x = torch.randn(taken, 3)
    with torch.no_grad():
        wanted = model(x)
    with Line(traced(model, torch.ones(3, 3)), cut=["last"], microbatches=1, **OPTIONS) as line:
        assert torch.equal(line.predict(x), wanted)
        with pytest.raises(DataError, match=reason):
            line.predict(torch.ones(refused, 3))


class LenRecurrent(nn.Module):
    """Makes its hidden state of `len(ids)` rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.rnn(self.words(ids), (torch.zeros(1, len(ids), 4), torch.zeros(1, len(ids), 4)))
        return self.head(x[:, -1])


def test_an_lstm_whose_state_is_made_of_len_trains_with_any_rows() -> None:
    whole = WholeModel(
        LenRecurrent, lambda g: (torch.randint(9, (5, 4), generator=g), torch.arange(5) % 3), ("", "rnn", "head"), {}
    )
    state, losses = train_whole(whole, 2, 2)
    layers = traced(whole.made(), torch.ones(4, 4, dtype=torch.int64))
    with Line(layers, cut=["rnn", "head"], microbatches=2, **OPTIONS) as line:
        assert [line.step(x, y).item() for x, y in whole.batches(2)] == losses
    assert all(torch.equal(value, state[name]) for name, value in line.state_dict().items())
    assert "len" not in globals()


class SmallDecoder(nn.Module):
    """A small transformer with learned positions for 12 tokens, a causal mask and a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.drop = nn.Embedding(20, 8), nn.Embedding(12, 8), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        tokens = ids.shape[1]
        x = self.drop(self.words(ids) + self.places.weight[:tokens])
        ahead = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, ahead, mask == 0)
        return self.head(x)


def sentences(generator: torch.Generator) -> tuple[Any, Tensor]:
    """Of another length in each batch."""
    tokens = int(torch.randint(4, 13, (), generator=generator))
    ids = torch.randint(20, (5, tokens), generator=generator)
    mask = (torch.arange(tokens) < torch.randint(2, tokens + 1, (5, 1), generator=generator)).long()
    return {"ids": ids, "mask": mask}, ids.roll(-1, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:in evaluation mode:RuntimeWarning")  # torch's fast path
def test_texts_of_other_lengths_than_the_examples_train_as_in_the_plain_loop() -> None:
    whole = WholeModel(SmallDecoder, sentences, ("", "places", "drop", "blocks.0", "blocks.1", "blocks.2", "head"), {})
    layers = traced(whole.made(), {"ids": torch.arange(12).view(2, 6), "mask": torch.ones(2, 6, dtype=torch.int64)})
    seeded = WholeModel(SmallDecoder, sentences, ("", *layers.names[1:]), {})
    state, losses = train_whole(seeded, 4, 2)
    assert len({x["ids"].shape[1] for x, _ in whole.batches(4)}) > 2
    with Line(layers, cut=["blocks.1", "head"], microbatches=2, **OPTIONS) as line:
        assert [line.step(x, y).item() for x, y in whole.batches(4)] == losses
        ids = torch.zeros(4, 13, dtype=torch.int64)
        with pytest.raises(DataError, match=r"input ids has 13 in dimension 1 .* traced for 2 to 12 tokens there"):
            line.predict({"ids": ids, "mask": ids})
        with pytest.raises(DataError, match=r"input mask has 8 in dimension 1 .* and input ids 7"):
            line.predict({"ids": ids[:, :7], "mask": ids[:, :8]})
    assert all(torch.equal(value, state[name]) for name, value in line.state_dict().items())


def test_a_text_of_another_length_has_the_models_bits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 3), Asking(lambda x: x - x.mean(1, keepdim=True)))
    with Line(traced(model, torch.arange(12).view(2, 6) % 9), stages=2, microbatches=1, **OPTIONS) as line:
        for tokens in (2, 6, 11):
            ids = torch.randint(9, (3, tokens))
            with torch.no_grad():
                assert torch.equal(line.predict(ids), model(ids))
        with pytest.raises(DataError, match=r"has 1 in dimension 1 .* traced for 2 tokens or more there"):
            line.predict(torch.ones(2, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(18, 3)), "traced for 6 tokens there"),
        (nn.Sequential(nn.Embedding(9, 3), Asking(lambda x: x if x.shape[0] < x.shape[1] else -x)), "with 6 there"),
    ],
    ids=["flat", "of both"],
)
def test_a_length_that_the_forward_needs_is_that_of_the_example(model: nn.Module, reason: str) -> None:
    ids = torch.arange(12).view(2, 6) % 9
    with Line(traced(model, ids), stages=1, microbatches=1, **OPTIONS) as line:
        with torch.no_grad():
            assert torch.equal(line.predict(ids), model(ids))
        with pytest.raises(DataError, match=f"has 7 in dimension 1 .*{reason}"):
            line.predict(torch.ones(2, 7, dtype=torch.int64))
