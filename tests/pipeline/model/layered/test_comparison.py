"""A traced model is compared with the model itself: what torch.export loses is refused by name, and nothing else is."""

import os
import re
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stageline import Line, ModelRefused, PlanRefused, read_plan, traced
from stageline.pipeline.model.cut import build_segments, cut_model
from stageline.pipeline.model.stage_weights import made_without_memory
from stageline.workers.runtime.losses import ComputeFailed
from support.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

SGD = partial(torch.optim.SGD, lr=0.1)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


class Sign(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Doubled(torch.autograd.Function):
    """Has the backward that torch would find, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2.0


def tripled(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: 3 * gradient)
    return x * 1.0


class Net(nn.Module):
    """first, middle, head, and `change` of what the middle gives."""

    def __init__(self, change: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.change(self.middle(self.first(x))))  # type: ignore[no-any-return]


class Checkpointed(Net):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.drop, self.reentrant = nn.Dropout(0.3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return self.drop(self.middle(x).tanh())  # type: ignore[no-any-return]

        return self.head(checkpoint(part, self.first(x), use_reentrant=self.reentrant))  # type: ignore[no-any-return]


def hooked() -> Net:
    model = Net()
    model.middle.register_full_backward_hook(lambda module, given, gradients: tuple(2 * each for each in given))
    return model


WRONG: dict[str, tuple[Callable[[], nn.Module], str, str]] = {  # what is named, and the last layer it shows in
    "gradient reversal": (lambda: Net(Reverse.apply), r"the backward of [\w.]*test_comparison.Reverse", "middle"),
    "straight-through sign": (lambda: Net(Sign.apply), r"the backward of [\w.]*test_comparison.Sign", "middle"),
    "reentrant checkpoint": (lambda: Checkpointed(reentrant=True), r"checkpoint\(use_reentrant=True\)", "first"),
    "hook of a tensor": (lambda: Net(tripled), "a hook of a tensor", "middle"),
    "backward hook of a module": (hooked, "the backward hook hooked.<locals>.<lambda> of middle", "first"),
}


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return build()


def line_of(layers: Any, **options: Any) -> Line:
    settings = {"loss": functional.mse_loss, "optimizer": SGD, "microbatches": 1}
    return Line(layers, **settings, workers="inline", **options)


def one_step(layers: Any) -> dict[str, Tensor]:
    """The weights after a step of the graphs as they are; those before it if the graphs have no gradient at all."""
    with suppress(ComputeFailed), line_of(layers, accept_difference=True) as line:
        line.step(torch.ones(3, 4), torch.zeros(3, 2))
        return line.state_dict()
    return layers.model.state_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("example", [torch.zeros(2, 4), torch.eye(4)], ids=["zeros", "numbers"])
def test_what_torch_export_loses_is_refused_by_name_unless_it_is_accepted(name: str, example: Tensor) -> None:
    build, lost, last = WRONG[name]
    layers = traced(seeded(build), example)
    with pytest.raises(ModelRefused, match=f"in training mode, the gradient of .*in layer {last}.*{lost}") as refused:
        line_of(layers)
    for said in ("stageline.Layers", "accept_difference=True", "first.weight"):
        assert said in str(refused.value)
    with pytest.raises(ModelRefused, match=re.escape("model.accept_difference = true")):
        cut_model(layers)
    plain = seeded(build)
    functional.mse_loss(plain(torch.ones(3, 4)), torch.zeros(3, 2)).backward()
    SGD(plain.parameters()).step()
    assert not torch.equal(one_step(layers)["first.bias"], plain.state_dict()["first.bias"])


def test_the_largest_difference_is_told() -> None:
    model = seeded(lambda: Net(Reverse.apply))
    model(torch.eye(4)).backward(gradient := torch.randn(4, 2, generator=torch.Generator().manual_seed(1)))
    reversed_gradients = [2 * each.grad.abs().max() for each in (*model.first.parameters(), *model.middle.parameters())]
    model.zero_grad()
    assert gradient.shape == (4, 2)
    assert f"(by up to {max(reversed_gradients):.2g})" in traced(model, torch.eye(4)).difference


class Everything(nn.Module):
    """Dropout, running statistics, a buffer that counts, weights that a forward changes, checkpoints, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8, max_norm=0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        x = self.drop(self.norm(self.words(ids)[:, 0])) * scale
        if self.training:
            self.calls += 1
        x = checkpoint(self.middle, Doubled.apply(x), use_reentrant=False)
        return {"logits": self.head(self.frozen(x)), "mean": x.mean() + torch.randn(()) * 0.1}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    gradients = {f"{name}.grad": each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: each.detach().clone() for name, each in {**model.state_dict(), **gradients}.items()}


def test_a_model_that_trains_as_its_graphs_do_is_accepted_and_left_as_it_is() -> None:
    torch.manual_seed(0)
    model, ids, scale = Everything(), torch.arange(4).view(4, 1), torch.ones(4, 1)
    model(ids, scale)["logits"].sum().backward()
    model.frozen.eval()
    called: list[str] = []
    with torch.no_grad():
        model.words.weight.mul_(3)  # a forward makes them small again
    model.head.weight.register_hook(lambda gradient: called.append("gradient"))
    model.head.bias.register_post_accumulate_grad_hook(lambda parameter: called.append("update"))
    before, random, modes = state_of(model), torch.default_generator.get_state(), [m.training for m in model.modules()]
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    layers = traced(model, {"ids": ids, "scale": scale})
    assert layers.difference == ""
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    assert state_of(model).keys() == before.keys()
    assert torch.equal(torch.default_generator.get_state(), random)
    assert modes == [module.training for module in model.modules()]
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]
    assert called == []
    model(ids, scale)["logits"].sum().backward()
    assert sorted(called) == ["gradient", "update"]


class ElsewhereEvaluated(Net):
    """Evaluates by other operators while it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if self.training:
            return found
        return found * 0.7 * 0.3 if torch.compiler.is_exporting() else found * 0.21


def test_a_difference_of_rounding_in_evaluation_alone_is_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match="in evaluation mode, the graphs of the ElsewhereEvaluated round otherwise"):
        layers = traced(ElsewhereEvaluated(), torch.randn(30, 4))
    assert layers.difference == ""
    cut_model(layers)


class Attending(nn.Module):
    """torch's own attention, which evaluates by one operator, unless a module has hooks or something traces it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "build",
    [Attending, lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 2))],
    ids=["attention", "encoder layer"],
)
def test_torchs_fast_operators_for_evaluation_are_in_the_graph(build: Callable[[], nn.Module]) -> None:
    model, x = seeded(build), torch.randn(3, 5, 8)
    layers = traced(model, x)  # without a warning
    model.eval()
    found: Any = x
    with torch.no_grad():
        wanted = model(x)
        for layer in layers.bound:
            found = layer.eval()(found)
    assert torch.equal(found, wanted)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            assert not torch.equal(model(x), wanted)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class Growing(Net):
    """Computes something else each time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_another_output_in_evaluation_is_refused() -> None:
    with pytest.raises(ModelRefused, match=r"in evaluation mode, the output \(by up to .* the change of calls\."):
        cut_model(traced(Growing(), torch.eye(4)))


def test_an_example_that_the_model_does_not_take_is_refused_with_the_models_error() -> None:
    """torch.export does not look at the values."""
    with pytest.raises(ModelRefused, match="does not fit: the Sequential, called with it, raises IndexError"):
        traced(nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2)), torch.full((2, 3), 4))


def test_weights_that_are_in_files_only_are_compared_with_random_numbers() -> None:
    for change, differs in ((torch.tanh, False), (Reverse.apply, True)):
        layers, _ = made_without_memory(lambda change=change: traced(Net(change), torch.zeros(2, 4)), 0)  # type: ignore[misc]
        assert bool(layers.difference) is differs
        assert all(parameter.is_meta for layer in layers.bound for parameter in layer.parameters())


def test_a_large_model_whose_weights_are_in_files_only_is_said_not_to_be_compared() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 1 << 15), nn.Linear(1 << 15, 4097), nn.Linear(4097, 2))
    with pytest.warns(RuntimeWarning, match="the Sequential is too large to be compared"):
        traced(model, torch.zeros(2, 4))


class Called(Net):
    """Notes in which processes its forward runs."""

    processes: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        Called.processes += (os.getpid(),)
        return super().forward(x)


@pytest.mark.slow
def test_where_torch_has_gpus_a_fork_compares_so_that_this_process_can_still_be_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first backward here would start torch's threads for GPUs, without which forks cannot compute. So this process
    only traces. It has computed in parallel, which a fork by the same thread would wait for."""
    torch.set_num_threads(2)
    torch.randn(2**20).exp()
    traced(Called(), torch.eye(4))
    here = len(Called.processes)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    layers = traced(Called(Reverse.apply), torch.eye(4))
    traces = len(Called.processes) - here
    assert set(Called.processes) == {os.getpid()}
    assert 0 < traces < here
    with pytest.raises(ModelRefused, match=r"the backward of [\w.]*Reverse"):
        cut_model(layers)
    assert traced(Net(), torch.eye(4)).difference == ""
    with pytest.raises(ModelRefused, match="does not fit: the Sequential, called with it, raises IndexError"):
        traced(nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2)), torch.full((2, 3), 4))


def test_a_comparison_whose_process_is_killed_is_said_not_to_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    here = os.getpid()

    def killed(x: Tensor) -> Tensor:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return x.tanh()

    with pytest.warns(RuntimeWarning, match="the Net could not be compared with its graphs: .* with status -9"):
        traced(Net(killed), torch.eye(4))


def test_a_plan_says_that_a_difference_is_accepted(workspace: Workspace) -> None:
    workspace.write(
        "model.py",
        "import torch\nfrom torch import nn\nfrom torch.utils.checkpoint import checkpoint\n"
        "from stageline import traced\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)\n"
        "    def forward(self, x):\n"
        "        x = self.first(x)\n"
        "        x = x + self.last(x).sum() if self.training else x\n"
        "        return checkpoint(torch.tanh, x, use_reentrant=True)\n"
        "def build(**options):\n"
        "    return traced(Net(), torch.zeros(2, 4))\n",
    )
    sets = ["model.cut=[1]", "model.options={}"]
    with pytest.raises(ModelRefused, match=r"checkpoint\(use_reentrant=True\).*model.accept_difference = true"):
        build_segments(read_plan(workspace.folder, sets=sets))
    assert len(build_segments(read_plan(workspace.folder, sets=[*sets, "model.accept_difference=true"]))) == 2
    with pytest.raises(PlanRefused, match=r"model\.accept_difference"):
        read_plan(workspace.folder, sets=[*sets, "model.accept_difference=1"])


def test_a_buffer_in_read_only_or_shared_memory_is_not_written_to(tmp_path: Path) -> None:
    """A write to a mapping of a read-only file ends the process."""
    numpy.save(tmp_path / "table.npy", numpy.full((3, 4), numpy.nan, numpy.float32))
    with warnings.catch_warnings(action="ignore"):  # torch tells that the memory is read-only
        mapped = torch.from_numpy(numpy.load(tmp_path / "table.npy", mmap_mode="r"))
    for table in (mapped, torch.zeros(1).expand(3, 4), torch.zeros(2, 2).to(torch.float8_e4m3fn)):
        model = Net()
        model.register_buffer("table", table)
        assert traced(model, torch.eye(4)).difference == ""
        assert model.table is table


class Words(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.words, self.change, self.head = nn.Embedding(9, 4, sparse=True), change, nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.change(self.words(ids)))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("forks", [False, True])
def test_sparse_gradients_are_compared(forks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: forks)
    ids = torch.tensor([[1, 2], [1, 4]])
    assert traced(Words(), ids).difference == ""
    assert "the gradient of words.weight (by up to" in traced(Words(Reverse.apply), ids).difference


@pytest.mark.parametrize("forks", [False, True])
def test_an_error_of_the_comparison_itself_does_not_accept_the_model(
    forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> bool:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: forks)
    monkeypatch.setattr(torch, "equal", fails)
    layers = traced(Net(), torch.eye(4))
    monkeypatch.undo()
    with pytest.raises(ModelRefused, match=r"could not be compared.*no such kernel.*accept_difference = true"):
        cut_model(layers)


def test_parameters_that_are_frozen_now_are_compared_as_they_may_be_trained_later() -> None:
    model = Net(Reverse.apply)
    model.first.requires_grad_(False)
    model.middle.requires_grad_(False)
    assert "the gradient of first.weight" in traced(model, torch.eye(4)).difference
    assert [each.requires_grad for each in model.parameters()] == [False] * 4 + [True] * 2


def test_weights_of_zeros_do_not_hide_a_backward() -> None:
    model = Net(Reverse.apply)
    nn.init.zeros_(model.head.weight)
    assert "the gradient of first.weight" in traced(model, torch.eye(4)).difference
    assert not model.head.weight.any()


class Chance(Net):
    """Takes no other weights than probabilities."""

    def __init__(self) -> None:
        super().__init__(Reverse.apply)
        self.keep = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.bernoulli(self.keep.detach()))


def test_weights_are_as_they_are_for_a_model_that_takes_no_others() -> None:
    assert "the gradient of first.weight, first.bias" in traced(Chance(), torch.eye(4)).difference


class Arc(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.acosh(x))


def test_the_example_itself_is_used_where_random_numbers_give_nan_and_nan_of_its_own_is_said() -> None:
    told = traced(Arc(Reverse.apply), torch.full((2, 4), 2.0)).difference
    assert "the gradient of first.weight, first.bias" in told
    assert "on one side only" not in told
    with pytest.warns(RuntimeWarning, match="the Arc itself makes NaN of the example: the output"):
        traced(Arc(), torch.zeros(2, 4))


def test_a_fork_that_the_system_refuses_is_said_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(os, "fork", refused)
    with pytest.warns(RuntimeWarning, match="could not be compared.*Cannot allocate memory.*Trace it again"):
        traced(Net(), torch.eye(4))


def test_a_script_that_ignores_the_ends_of_its_children_gets_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    former = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert "the backward of" in traced(Net(Reverse.apply), torch.eye(4)).difference
    finally:
        signal.signal(signal.SIGCHLD, former)


class Padded(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor] = torch.tanh, **settings: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.head, self.change = nn.TransformerEncoder(layer, 2, **settings), nn.Linear(8, 2), change

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.change(self.encoder(x, src_key_padding_mask=mask)))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_torchs_fast_path_for_evaluation_is_named_in_a_warning() -> None:
    """It leaves zeros where the mask is, and the rest of torch's code does not."""
    example = {"x": torch.randn(4, 5, 8), "mask": torch.arange(5).expand(4, 5) > torch.tensor([[2], [2], [4], [4]])}
    with pytest.warns(RuntimeWarning, match="fast path.*the output.*set_fastpath_enabled"):
        layers = traced(Padded(), example)
    with pytest.warns(RuntimeWarning, match="fast path"):  # makes nested tensors, of which torch.export has no graph
        cut_model(traced(Padded(mask_check=False), example))
    cut_model(layers)
    assert torch.backends.mha.get_fastpath_enabled()
    assert "in training mode, the gradient" in traced(Padded(Reverse.apply), example).difference
