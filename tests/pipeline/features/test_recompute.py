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
from stageline.pipeline.features.recompute import Recompute, outermost, recomputable
from stageline.pipeline.stage.layers.passage import layer_seed
from stageline.pipeline.stage.settings import StageSettings
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
    make = partial(Stage, optimizer=SGD)
    settings = partial(StageSettings, recompute=recompute, **options)
    first = make(modules[:cut], settings=settings(names=names[:cut]))
    last = make(
        modules[cut:], index=1, first_layer=cut, loss=functional.cross_entropy, settings=settings(names=names[cut:])
    )
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
    ("recompute", "forwards"),
    [(None, [1, 1]), ("stage", [2, 2]), ("layers", [2, 2]), (["1"], [1, 2]), (["2"], [1, 1])],
    ids=str,
)
def test_only_what_is_named_runs_again_and_not_in_evaluation(recompute: Recompute | None, forwards: list[int]) -> None:
    watched = [ForwardCounter(), ForwardCounter()]
    stage = Stage([*watched, nn.Tanh()], settings=StageSettings(recompute=recompute))
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

    stage = Stage([nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)], settings=StageSettings(recompute="stage"))
    with saved_tensors_hooks(note, lambda tensor: tensor):
        stage.forward(torch.randn(2, 8))
    assert kept == {(2, 8): 1}


def test_layers_are_tapped_once() -> None:
    tapped: list[str] = []
    stage = Stage([nn.Linear(8, 8), nn.Tanh()], settings=StageSettings(recompute="stage"))
    with stage.tapped(lambda name, output: tapped.append(name)):
        stage.forward(torch.randn(2, 8))
        stage.backward(torch.ones(2, 8))
    assert tapped == ["0", "1"]


@pytest.mark.parametrize("recompute", ["stage", ["0"]], ids=str)
def test_weights_that_change_before_the_forward_has_run_again_are_refused(recompute: Recompute) -> None:
    stage = Stage([nn.Linear(4, 4), nn.Tanh()], optimizer=SGD, settings=StageSettings(recompute=recompute))
    for step in range(2):
        stage.forward(torch.randn(2, 4), step=step, microbatch=0)
    stage.backward(torch.ones(2, 4), step=0, microbatch=0)
    stage.update()
    with pytest.raises(StageError, match=r"weights of (0|the stage) have changed between a forward and its backward"):
        stage.backward(torch.ones(2, 4), step=1, microbatch=0)


@pytest.mark.parametrize(("how", "ahead"), [("stash_weights", 3), ("delay_weights", 2)])
@pytest.mark.parametrize("recompute", KINDS, ids=str)
def test_with_versions_of_the_weights_the_forward_runs_again_with_those_it_used(
    recompute: Recompute, how: str, ahead: int
) -> None:
    def run(recompute: Recompute | None) -> dict[str, Tensor]:
        layers = named_layers()
        names, modules = list(layers), list(layers.values())
        versions: Any = {how: True}
        stage = Stage(modules, optimizer=SGD, settings=StageSettings(names=names, recompute=recompute, **versions))
        outputs = [stage.forward(batch(step, 0)[0], step=step, microbatch=0) for step in range(ahead)]
        for step in range(4):
            stage.backward(torch.ones_like(outputs[step]), step=step, microbatch=0)
            stage.update()
            outputs.append(stage.forward(batch(step + ahead, 0)[0], step=step + ahead, microbatch=0))
        return stage.state_dict()

    assert_equal(run(recompute), run(None))


def test_a_module_that_writes_to_its_input_is_refused_by_name() -> None:
    stage = Stage([nn.Linear(4, 4), nn.ReLU(inplace=True)], settings=StageSettings(recompute=["1"]))
    with pytest.raises(StageError, match=r"^1 writes to what it is given"):
        stage.forward(torch.randn(2, 4))


class Nested(nn.Module):
    """Takes and gives its tensors in a dict."""

    def __init__(self, *, writes: bool = False) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(4, 4), writes

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.writes:
            given["x"].mul_(2)
        return {"x": torch.sin(self.linear(given["x"] * 2)), "skip": given["x"]}


class WritesSkip(nn.Module):
    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return given["x"] + given["skip"].mul_(3)


class SharesBuffer(nn.Module):
    """Counts in a buffer that a module in it has, too."""

    def __init__(self) -> None:
        super().__init__()
        calls = torch.zeros(())
        self.linear, self.inner = nn.Linear(4, 4), nn.Module()
        self.register_buffer("calls", calls)
        self.inner.register_buffer("calls", calls)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return {"x": torch.sin(self.linear(x) + self.inner.calls)}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.sin(each(x)) for each in self.branches]).sum(0)


def in_dicts(*, writes: bool = False) -> list[nn.Module]:
    return [SharesBuffer(), Nested(writes=writes), WritesSkip()]


def one_step(layers: list[nn.Module], recompute: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    for layer in layers:
        layer.apply(lambda each: each.reset_parameters() if isinstance(each, nn.Linear) else None)  # type: ignore[no-any-return]
    stage = Stage(
        layers,
        optimizer=SGD,
        loss=lambda output, _: output.square().mean(),
        settings=StageSettings(recompute=recompute),
    )
    for microbatch in range(2):
        stage.forward(batch(0, microbatch)[0][:, :4], torch.zeros(()), microbatch=microbatch)
    for microbatch in range(2):
        stage.backward(microbatch=microbatch)
    stage.update()
    return {name: each.clone() for name, each in stage.state_dict().items()}


def test_a_module_that_writes_to_a_tensor_in_what_it_is_given_is_refused_by_itself() -> None:
    # What lies in a dict was run again as it had become: other gradients, without a word.
    make = partial(in_dicts, writes=True)
    with pytest.raises(StageError, match="1 writes to what it is given"):
        one_step(make(), ["1"])
    assert_equal(one_step(make(), "stage"), one_step(make(), None))
    assert_equal(one_step(make(), ["1.linear"]), one_step(make(), None))


def test_a_tensor_in_what_a_module_was_given_that_is_written_to_later_is_found() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        one_step(in_dicts(), ["1"])


@pytest.mark.parametrize("recompute", ["stage", ["0"]])
def test_modules_that_share_a_buffer_share_it_when_they_run_again(recompute: Any) -> None:
    assert_equal(one_step(in_dicts(), recompute), one_step(in_dicts(), None))


def test_of_a_list_of_modules_those_in_it_run_again_since_it_has_no_forward() -> None:
    named = recomputable(["0"], [Branches()])
    assert [*outermost(named, ["0.*"])] == ["0.branches.0", "0.branches.1"]
    assert_equal(one_step([Branches()], ["0.*"]), one_step([Branches()], None))


@pytest.mark.parametrize("recompute", ["all", "b*", 5, [1]])
def test_what_is_neither_the_stage_nor_patterns_is_refused(recompute: Any) -> None:
    with pytest.raises(StageError, match='expected "stage", "layers" or a list of patterns of names'):
        Stage([nn.Linear(4, 4)], optimizer=SGD, settings=StageSettings(recompute=recompute))
