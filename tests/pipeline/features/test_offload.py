"""Activations that lie elsewhere between forward and backward come back as they were."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.pipeline.features import offload
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.workers.extras.preflight.trial_stages import LiveBytes

pytestmark = pytest.mark.usefixtures("one_thread")

ADAM = partial(torch.optim.AdamW, lr=0.05)
MICROBATCHES = 3


class BytesParcel:
    def __init__(self, data: Tensor) -> None:
        self._content = bytearray(data.numpy().tobytes())
        self.fetched = 0
        self.given = 0

    def fetch(self) -> None:
        self.fetched += 1

    def bytes(self) -> Tensor:
        self.given += 1
        data = torch.empty(len(self._content), dtype=torch.uint8)
        return data.copy_(torch.frombuffer(self._content, dtype=torch.uint8))


class BytesScratch:
    def __init__(self) -> None:
        self.parcels: list[BytesParcel] = []

    def put(self, data: Tensor) -> BytesParcel:
        self.parcels.append(BytesParcel(data))
        return self.parcels[-1]


class TwoUses(nn.Module):
    """Saves one tensor several times, and views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h * h.t().contiguous().t() + h[:, ::2].repeat(1, 2).sigmoid() * x


def model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8), nn.ReLU(inplace=True), TwoUses(), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 8)]


def trained(scratch: BytesScratch | None, *, ahead: int = 3, **options: Any) -> dict[str, Tensor]:
    """`ahead` microbatches are run forward before the first goes backward; with versions of the weights, each is a
    step."""
    stage = Stage(model(), optimizer=ADAM, settings=StageSettings(**options))
    if scratch is not None:
        stage.offload_activations(scratch)
    drawn = torch.Generator().manual_seed(1)
    inputs = [torch.randn(6, 8, generator=drawn) for _ in range(3 * MICROBATCHES)]
    outputs: list[Tensor] = []
    for place in range(len(inputs) + ahead - 1):
        if place < len(inputs):
            outputs.append(stage.forward(inputs[place], step=place, microbatch=0))
        if place >= ahead - 1:
            output = outputs.pop(0)
            gradient = torch.randn(6, 8, generator=torch.Generator().manual_seed(place)).to(output.dtype)
            stage.backward(gradient, step=place - ahead + 1, microbatch=0)
            if options.keys() & {"stash_weights", "delay_weights"}:
                stage.update()
    stage.update()
    return stage.state_dict()


@pytest.mark.parametrize("least", [0, 90], ids=["all", "large"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute": "stage"},
        {"recompute": ["2", "5"]},
        {"stash_weights": True},
        {"delay_weights": True, "ahead": 2},
        {"delay_weights": True, "ahead": 2, "recompute": ["2", "5"]},
        {"autocast": "bf16"},
    ],
    ids=str,
)
def test_no_bit_changes(options: dict[str, Any], least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST", least)
    scratch = BytesScratch()
    found, wanted = trained(scratch, **options), trained(None, **options)
    assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert any(parcel.given for parcel in scratch.parcels)


def test_the_memory_is_free_between_forward_and_backward_but_for_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST", 4096)
    stage = Stage([nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)])
    stage.offload_activations(BytesScratch())
    live = LiveBytes()
    with live.watched():
        stage.forward(torch.randn(64, 64))
    size = 64 * 64 * 4
    assert live.now == size  # 5 sizes without
    with live.watched():
        stage.backward(torch.ones(64, 64))


def test_what_several_nodes_save_goes_once_and_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST", 0)
    scratch = BytesScratch()
    stage = Stage([nn.Linear(8, 8, bias=False)])
    stage.offload_activations(scratch)
    stage.forward((torch.randn(6, 8)).requires_grad_())
    assert len(scratch.parcels) == 1  # the input; the weight, which is saved too, stays
    assert stage.backward(torch.ones(6, 8)) is not None


def test_the_next_microbatch_is_fetched_while_one_goes_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST", 0)
    scratch = BytesScratch()
    stage = Stage([nn.Linear(8, 8), nn.Tanh()])
    stage.offload_activations(scratch)
    for microbatch in range(2):
        stage.forward(torch.randn(6, 8), step=0, microbatch=microbatch)
    assert not any(parcel.fetched for parcel in scratch.parcels)
    stage.backward(torch.ones(6, 8), step=0, microbatch=0)
    assert all(parcel.fetched == 1 for parcel in scratch.parcels)


def test_both_halves_of_a_backward_get_what_was_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST", 0)
    weights = []
    for scratch in (BytesScratch(), None):
        stage = Stage(model(), optimizer=ADAM)
        if scratch is not None:
            stage.offload_activations(scratch)
        for microbatch in range(2):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(microbatch)).requires_grad_()
            stage.forward(x, step=0, microbatch=microbatch)
        for microbatch in range(2):
            stage.backward_input(torch.ones(6, 8), step=0, microbatch=microbatch)
        for microbatch in range(2):
            stage.backward_weight(step=0, microbatch=microbatch)
        stage.update()
        weights.append(stage.state_dict())
    assert not [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])]
