"""A backward in two halves gives the bits of an undivided one, whatever the layers are, however late the second is."""

import gc
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stageline.pipeline.errors import StageError
from stageline.pipeline.features.ties import SharedGradients, SharedParameters
from stageline.pipeline.program import Tied
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree, map_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
M = 3  # microbatches


class UsedAgain(nn.Module):
    """A weight that is used three times, twice on one path."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.once = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.again(x).tanh()
        return self.again(self.once(first) + first) + 2 * self.again(x)


class Computed(nn.Module):
    """A weight that is computed from others, once, for two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.direction, self.length = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.rand(8, 1))
        self.between = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = functional.normalize(self.direction) * self.length
        return functional.linear(self.between(functional.linear(x, weight).relu()), weight)


class OfWeightsAlone(nn.Module):
    """Returns what depends on its input, what depends on weights alone, and a weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.code = nn.Parameter(torch.randn(1, 8)), nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + self.place, (self.code * 2).tanh(), x * self.code.sum(0)


class Several(nn.Module):
    """Takes a tuple; one of its tensors needs no gradient, and one of its outputs has none."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        one, other, numbers = given
        return self.left(one) * numbers + self.right(other), other


class Recomputed(nn.Module):
    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Hooked(nn.Module):
    """A gradient that is changed by a hook of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 3)
        return self.second(hidden.relu())


class ScaledBy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return ScaledBy.apply(self.inner(ScaledBy.apply(x, self.weight)), self.weight)


def frozen_below() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    layers[0].requires_grad_(False)
    return layers


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.GroupNorm(2, 8),
        nn.MaxPool2d(2),
        nn.PReLU(),
    )


FLAT, PLANES, WORDS = (4, 8), (4, 4, 10, 10), (4, 5, 8)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear, in place, dropout": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 8)),
        FLAT,
    ),
    "in place first": (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), FLAT),
    "no weights": (nn.Tanh, FLAT),
    "frozen": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False), FLAT),
    "frozen below": (frozen_below, FLAT),
    "a weight used again": (UsedAgain, FLAT),
    "a weight computed from others": (Computed, FLAT),
    "outputs of weights alone": (OfWeightsAlone, FLAT),
    "recomputed": (Recomputed, FLAT),
    "a hook": (Hooked, FLAT),
    "a function of the user's": (OwnFunction, FLAT),
    "convolutions": (convolutions, PLANES),
    "convolutions, channels last": (lambda: convolutions().to(memory_format=torch.channels_last), PLANES),
    "a transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), WORDS),
    "a recurrent net": (lambda: nn.Sequential(nn.GRU(8, 8, 2, batch_first=True), FirstOfTwo(), nn.Linear(8, 8)), WORDS),
    "all of them": (lambda: nn.Sequential(UsedAgain(), Computed(), Recomputed(), Hooked(), OwnFunction()), FLAT),
}


class FirstOfTwo(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return given[0]


def stage(layers: nn.Module, loss: Any = None, **options: Any) -> Stage:
    return Stage(deepcopy(layers), optimizer=SGD, loss=loss, settings=StageSettings(**options))


def randoms(like: Tree, seed: int) -> Tree:
    drawn = torch.Generator().manual_seed(seed)
    return map_tensors(
        lambda each: torch.randn(each.shape, generator=drawn).to(each.dtype) if each.requires_grad else None, like
    )


def run(made: Stage, batches: list[Tree], *, split: bool) -> list[Tree]:
    """The gradients of the inputs; with `split`, all first halves before all second ones."""
    outputs = [made.forward(x, microbatch=number) for number, x in enumerate(batches)]
    backward = made.backward_input if split else made.backward
    found = [backward(randoms(y, k), step=0, microbatch=k) for k, y in enumerate(outputs)]
    for number in range(len(batches) if split else 0):
        made.backward_weight(step=0, microbatch=number)
    return found


def gradients(made: Stage) -> dict[str, Tensor | None]:
    return {name: each.grad for name, each in made._body.named_parameters()}


def same(found: object, wanted: object) -> bool:
    if not isinstance(wanted, Tensor):
        return found is wanted is None
    return isinstance(found, Tensor) and torch.equal(found, wanted) and found.stride() == wanted.stride()


def assert_same(found: Stage, wanted: Stage) -> None:
    expected = gradients(wanted)
    assert all(same(each, expected[name]) for name, each in gradients(found).items())


@pytest.mark.parametrize("autocast", [None, "bf16"])
@pytest.mark.parametrize("needs_gradient", [True, False], ids=["inner", "first"])
@pytest.mark.parametrize("layers", LAYERS)
def test_the_halves_have_the_bits_of_the_whole(layers, needs_gradient, autocast) -> None:
    make, shape = LAYERS[layers]
    torch.manual_seed(0)
    model = make()
    batches: list[Tree] = [torch.randn(shape).requires_grad_(needs_gradient) for _ in range(M)]
    wanted, found = stage(model, autocast=autocast), stage(model, autocast=autocast)
    expected, got = run(wanted, batches, split=False), run(found, batches, split=True)
    assert all(map(same, got, expected))
    assert (expected[0] is not None) == needs_gradient
    assert_same(found, wanted)
    assert any(each is not None for each in gradients(wanted).values()) == any(
        each.requires_grad for each in model.parameters()
    )
    assert found.in_flight == 0


def test_several_inputs_get_their_gradients_in_the_first_half() -> None:
    torch.manual_seed(0)
    model = Several()
    batches: list[Tree] = [
        (torch.randn(FLAT, requires_grad=True), torch.randn(FLAT, requires_grad=True), torch.randn(FLAT))
        for _ in range(M)
    ]
    wanted, found = stage(model), stage(model)
    for expected, got in zip(run(wanted, batches, split=False), run(found, batches, split=True), strict=True):
        assert same(got[0], expected[0])
        assert same(got[1], expected[1])
        assert got[2] is None
    assert_same(found, wanted)


def test_the_loss_is_split_as_activations_are() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    target = torch.tensor([0, 2, 1, 1])
    wanted, found = (stage(model, loss=functional.cross_entropy) for _ in range(2))
    for number in range(M):
        x = torch.randn(FLAT, requires_grad=True)
        for made in (wanted, found):
            made.forward(x, target, microbatch=number, share=1 / M)
        assert same(found.backward_input(), wanted.backward())
    for _ in range(M):
        found.backward_weight()  # the oldest
    assert_same(found, wanted)


def test_the_first_half_adds_nothing_to_weights() -> None:
    made = stage(nn.Linear(8, 8))
    made.forward(torch.randn(FLAT, requires_grad=True))
    assert made.backward_input(torch.ones(FLAT)) is not None
    assert set(gradients(made).values()) == {None}
    assert made.in_flight == 1
    with pytest.raises(StageError, match="holds 1 microbatches that have yet to go backward"):
        made.snapshot()
    made.backward_weight()
    assert made.in_flight == 0
    made.snapshot()


def test_a_stage_without_gradients_to_send_computes_all_of_them_in_the_second_half() -> None:
    calls = []
    made = stage(TellsBackward(calls))
    made.forward(torch.randn(FLAT))
    assert made.backward_input(torch.ones(FLAT)) is None
    assert calls == []
    made.backward_weight()
    assert calls == ["backward"]


class TellsBackward(nn.Module):
    """Tells when its backward runs."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls, self.inner = [calls], nn.Linear(8, 8)

    def __deepcopy__(self, memo: object) -> "TellsBackward":
        return self

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.calls[0].append("backward"))
        return output


def test_what_is_behind_the_last_weights_is_freed_by_the_first_half() -> None:
    made = stage(nn.Sequential(nn.Linear(8, 8), Large()))
    made.forward(torch.randn(FLAT, requires_grad=True))
    made.backward_input(torch.ones(4, 1))
    gc.collect()
    assert Large.saved.expired()
    made.backward_weight()


class Large(nn.Module):
    """Without weights; autograd keeps what it has computed."""

    saved: torch.multiprocessing.reductions.StorageWeakRef

    def forward(self, x: Tensor) -> Tensor:
        large = x.exp()
        Large.saved = torch.multiprocessing.reductions.StorageWeakRef(large.untyped_storage())
        return large.sum(1, keepdim=True)


def test_a_frozen_stage_keeps_nothing_between_the_halves() -> None:
    made = stage(nn.Sequential(nn.Linear(8, 8), Large(), nn.Linear(1, 1)).requires_grad_(False))
    made.forward(torch.randn(FLAT, requires_grad=True))
    assert made.backward_input(torch.ones(4, 1)) is not None
    gc.collect()
    assert Large.saved.expired()
    made.backward_weight()


@pytest.mark.parametrize("needs_gradient", [True, False], ids=["inner", "first"])
@pytest.mark.parametrize("layers", LAYERS)
def test_what_waits_between_the_halves_is_known_after_the_forward(layers, needs_gradient) -> None:
    make, shape = LAYERS[layers]
    torch.manual_seed(0)
    made = stage(make())
    output = made.forward(torch.randn(shape).requires_grad_(needs_gradient))
    told = made.halfway_bytes()
    made.backward_input(randoms(output, 0), step=0, microbatch=0)
    halves = made._halves.kept.values()
    kept = [each for half in halves for noted in half._noted.values() for each in noted if each is not None]
    kept += [gradient for half in halves for part in half._parts for _, gradient in part.roots]
    assert told == sum(each.numel() * each.element_size() for each in kept)
    made.backward_weight(step=0, microbatch=0)


def test_a_stage_that_cannot_split_its_backward_says_so_after_the_forward() -> None:
    made = stage(Recomputed(use_reentrant=True))
    assert made.halfway_bytes() == 0  # nothing is in flight
    made.forward(torch.randn(FLAT, requires_grad=True))
    assert made.halfway_bytes() is None
    assert stage(nn.Linear(8, 8), recompute="stage").halfway_bytes() is None


def test_checkpointing_that_computes_all_gradients_at_once_is_refused_by_name() -> None:
    made = stage(Recomputed(use_reentrant=True))
    made.forward(torch.randn(FLAT, requires_grad=True))
    with pytest.raises(StageError, match=r"stage 0 cannot .* use_reentrant=True.* Call it with use_reentrant=False"):
        made.backward_input(torch.ones(FLAT))


def test_a_stage_that_stashes_weights_splits_no_backward() -> None:
    made = stage(nn.Linear(8, 8), stash_weights=True)
    made.forward(torch.randn(FLAT, requires_grad=True))
    with pytest.raises(StageError, match="stage 0 stashes weights"):
        made.backward_input(torch.ones(FLAT))


def test_restoring_forgets_what_was_halfway() -> None:
    made = stage(nn.Linear(8, 8))
    state = made.snapshot()
    made.forward(torch.randn(FLAT, requires_grad=True))
    made.backward_input(torch.ones(FLAT))
    made.restore(state)
    assert made.in_flight == 0


@pytest.mark.parametrize("tied", ["microbatch", "step"])
def test_what_a_later_stage_shares_comes_first_in_the_sum(tied: Tied) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 8)

    def pair() -> list[Stage]:
        below, above = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            below.weight.copy_(weight)
            below.bias.fill_(0.5)
            above.weight.copy_(weight)
        owner = SharedParameters({"0.weight": "0.weight"}, above=frozenset({"0.weight"}))
        user = SharedParameters({"0.weight": "1.weight"}, below=frozenset({"0.weight"}))
        layers = nn.Sequential(nn.Linear(8, 8), below)
        with torch.no_grad():
            layers[0].weight.copy_(weight + 1)
            layers[0].bias.fill_(0.25)
        return [
            Stage([below, nn.Tanh()], optimizer=SGD, shared=owner),
            Stage([above], index=1, first_layer=1, optimizer=SGD, shared=user),
        ]

    whole, halves = pair(), pair()
    shared = SharedGradients()
    of_whole, of_halves = [shared.of(each) for each in whole], [shared.of(each) for each in halves]
    for number in range(M):
        x = torch.randn(FLAT, requires_grad=True)
        for first, last in (whole, halves):
            y = first.forward(x, microbatch=number)
            last.forward(y, microbatch=number)
        gradient = whole[1].backward(torch.ones(FLAT))
        sent = of_whole[1].leaving() if tied == "microbatch" else None
        wanted = whole[0].backward(gradient, roots=of_whole[0].roots(sent))
        gradient = halves[1].backward_input(torch.ones(FLAT))
        assert same(halves[0].backward_input(gradient), wanted)
        halves[1].backward_weight()
        sent = of_halves[1].leaving() if tied == "microbatch" else None
        halves[0].backward_weight(roots=of_halves[0].roots(sent))
    for stages, (owned, used) in ((whole, of_whole), (halves, of_halves)):
        if tied == "step":
            owned.subtotal(used.subtotal())
        used.exchange(owned.exchange())
        for each in stages:
            each.update()
    for found, wanted_stage in zip(halves, whole, strict=True):
        state, expected = found.state_dict(), wanted_stage.state_dict()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_stage_that_recomputes_splits_no_backward() -> None:
    made = stage(nn.Linear(8, 8), recompute="stage")
    made.forward(torch.randn(FLAT, requires_grad=True))
    with pytest.raises(StageError, match=r"stage 0 recomputes .*: take recompute out, or use .* 1f1b"):
        made.backward_input(torch.ones(FLAT))
