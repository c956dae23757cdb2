"""A stage that recomputes keeps less between forward and backward, and computes the same bits."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from stageline.pipeline.errors import StageError
from stageline.pipeline.stage.recompute import Recompute
from stageline.pipeline.stage.seeded_layers import layer_seed
from stageline.pipeline.stage.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS, MICROBATCHES = 3, 3
KINDS: list[Recompute] = ["stage", ["[!w]*"], ["block*"], ["block.0", "*.2"], ["norm", "drop"]]


class CountsCalls(nn.Module):
    """A module that computes with a buffer which each of its forwards changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls.clone()


def named_layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "first": nn.Linear(8, 16),
        "writes": nn.ReLU(inplace=True),
        "drop": nn.Dropout(0.3),
        "norm": nn.BatchNorm1d(16),
        "block": nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.GELU(), nn.BatchNorm1d(16), CountsCalls()),
        "head": nn.Linear(16, 3),
    }


def batch(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def unsplit(*, frozen: tuple[str, ...] = (), bf16: bool = False) -> dict[str, Tensor]:
    """The plain loop: all microbatches forward, then all backward, each layer seeded."""
    model = nn.ModuleDict(named_layers())
    for name in frozen:
        model[name].requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        losses = []
        for microbatch in range(MICROBATCHES):
            x, target = batch(step, microbatch)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):
                for number, layer in enumerate(model.values()):
                    torch.default_generator.manual_seed(layer_seed(0, step, microbatch, number))
                    x = layer(x)
                losses.append(functional.cross_entropy(x, target) / MICROBATCHES)
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def trained(cut: int, recompute: Any, *, frozen: tuple[str, ...] = (), **options: Any) -> dict[str, Tensor]:
    """The same by two stages."""
    layers = named_layers()
    for name in frozen:
        layers[name].requires_grad_(False)
    names, modules = list(layers), list(layers.values())
    make = partial(Stage, optimizer=SGD, recompute=recompute, **options)
    first = make(modules[:cut], names=names[:cut])
    last = make(modules[cut:], names=names[cut:], index=1, first_layer=cut, loss=functional.cross_entropy)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            x, target = batch(step, microbatch)
            y = first.forward(x, step=step, microbatch=microbatch)
            last.forward(y, target, step=step, microbatch=microbatch, share=1 / MICROBATCHES)
        for microbatch in range(MICROBATCHES):
            gradient = last.backward(step=step, microbatch=microbatch)
            first.backward(gradient, step=step, microbatch=microbatch)
        first.update()
        last.update()
    return {**first.state_dict(), **last.state_dict()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]


@pytest.mark.parametrize("recompute", KINDS, ids=str)
@pytest.mark.parametrize("cut", range(1, 6))
def test_what_runs_again_changes_no_bit_wherever_the_cut_is(cut: int, recompute: Recompute) -> None:
    # All microbatches are in flight at once; batch statistics and a buffer that is computed with change between them.
    assert_equal(trained(cut, recompute), unsplit())


@pytest.mark.parametrize("recompute", KINDS, ids=str)
def test_nor_in_bfloat16_nor_with_frozen_layers(recompute: Recompute) -> None:
    frozen = ("first", "norm")
    assert_equal(trained(3, recompute, frozen=frozen, autocast="bf16"), unsplit(frozen=frozen, bf16=True))


class ForwardCounter(nn.Linear):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("recompute", "forwards"), [(None, [1, 1]), ("stage", [2, 2]), (["1"], [1, 2]), (["2"], [1, 1])], ids=str
)
def test_only_what_is_named_runs_again_and_not_in_evaluation(recompute: Recompute | None, forwards: list[int]) -> None:
    watched = [ForwardCounter(), ForwardCounter()]
    stage = Stage([*watched, nn.Tanh()], recompute=recompute)
    stage.evaluate(torch.randn(2, 8))
    assert [each.forwards for each in watched] == [1, 1]
    stage.forward(torch.randn(2, 8))
    stage.backward(torch.ones(2, 8))
    assert [each.forwards - 1 for each in watched] == forwards
    assert all("forward" not in each.__dict__ for each in watched)


def test_a_stage_that_runs_again_keeps_its_input_and_nothing_else() -> None:
    kept: Counter[Any] = Counter()

    def note(tensor: Tensor) -> Tensor:
        kept[tuple(tensor.shape)] += 1
        return tensor

    stage = Stage([nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)], recompute="stage")
    with saved_tensors_hooks(note, lambda tensor: tensor):
        stage.forward(torch.randn(2, 8))
    assert kept == {(2, 8): 1}


def test_layers_are_tapped_once() -> None:
    tapped: list[str] = []
    stage = Stage([nn.Linear(8, 8), nn.Tanh()], recompute="stage")
    stage.tap = lambda name, output: tapped.append(name)
    stage.forward(torch.randn(2, 8))
    stage.backward(torch.ones(2, 8))
    assert tapped == ["0", "1"]


@pytest.mark.parametrize("recompute", ["stage", ["0"]], ids=str)
def test_weights_that_change_before_the_forward_has_run_again_are_refused(recompute: Recompute) -> None:
    stage = Stage([nn.Linear(4, 4), nn.Tanh()], optimizer=SGD, recompute=recompute)
    for step in range(2):
        stage.forward(torch.randn(2, 4), step=step, microbatch=0)
    stage.backward(torch.ones(2, 4), step=0, microbatch=0)
    stage.update()
    with pytest.raises(StageError, match=r"weights of (0|the stage) have changed between a forward and its backward"):
        stage.backward(torch.ones(2, 4), step=1, microbatch=0)


@pytest.mark.parametrize("recompute", KINDS, ids=str)
def test_with_weight_stashing_the_forward_runs_again_with_the_weights_it_used(recompute: Recompute) -> None:
    def run(recompute: Recompute | None) -> dict[str, Tensor]:
        layers = named_layers()
        names, modules = list(layers), list(layers.values())
        stage = Stage(modules, names=names, optimizer=SGD, stash_weights=True, recompute=recompute)
        outputs = [stage.forward(batch(step, 0)[0], step=step, microbatch=0) for step in range(3)]
        for step, output in enumerate(outputs):
            stage.backward(torch.ones_like(output), step=step, microbatch=0)
            stage.update()
            stage.forward(batch(step + 3, 0)[0], step=step + 3, microbatch=0)
        return stage.state_dict()

    assert_equal(run(recompute), run(None))


def test_a_module_that_writes_to_its_input_is_refused_by_name() -> None:
    stage = Stage([nn.Linear(4, 4), nn.ReLU(inplace=True)], recompute=["1"])
    with pytest.raises(StageError, match=r"^1 writes to what it is given"):
        stage.forward(torch.randn(2, 4))
