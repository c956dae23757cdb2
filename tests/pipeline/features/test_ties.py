"""Stages that share a parameter train it as if it were one, to the bit."""

from functools import partial, reduce
from itertools import pairwise
from operator import add

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline.pipeline.errors import GradientMismatch
from stageline.pipeline.features.ties import SharedGradients, TiedGradients
from stageline.pipeline.model.cut import cut_model
from stageline.pipeline.model.ties import ties_of
from stageline.pipeline.program import Tied
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree
from support.tied.model import WIDTH, WORDS, Embedding, Head, Mixing, loss
from support.tied_per_step import OwnWeights

pytestmark = pytest.mark.usefixtures("one_thread")

ADAM = partial(torch.optim.AdamW, lr=0.05)
M, STEPS = 4, 3
TITLE = "0.weight"  # what the first stage calls the parameter


def model() -> nn.Sequential:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(WORDS, WIDTH))
    return nn.Sequential(Embedding(weight), nn.Linear(WIDTH, WIDTH), Mixing(weight), nn.GELU(), Head(weight))


def batch(step: int) -> tuple[list[Tensor], list[Tensor]]:
    ids = torch.randint(WORDS, (2 * M, 5), generator=torch.Generator().manual_seed(step))
    return list(ids.tensor_split(M)), list(ids.roll(-1, 1).tensor_split(M))


def plain(tied: Tied, cut: list[int]) -> dict[str, Tensor]:
    whole = model()
    if tied == "step":
        stages = pairwise([0, *cut, len(whole)])
        uses = [[layer for layer in whole[low:high] if isinstance(layer, Embedding)] for low, high in stages]
        own = OwnWeights([each for each in uses if each])
    optimizer = ADAM(whole.parameters())
    for step in range(STEPS):
        for x, y in zip(*batch(step), strict=True):
            (loss(whole(x), y) * (1 / M)).backward()
        if tied == "step":
            own.add_up()
        optimizer.step()
        optimizer.zero_grad()
    return whole.state_dict()


def used_thrice(ids: Tensor, early: Tensor, middle: Tensor, late: Tensor) -> Tensor:
    mixed = functional.linear(functional.embedding(ids, early), middle).tanh() @ torch.ones(WORDS, WIDTH).tril()
    return functional.linear(mixed, late).transpose(1, 2)


def test_autograd_adds_a_later_use_to_an_earlier_one_in_each_microbatch_and_then_accumulates() -> None:
    """The rule that the messages follow: docs/project/decisions/tied.md."""
    one = nn.Parameter(torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(0)))
    copies = [one.detach().clone().requires_grad_() for _ in range(3)]
    found: list[tuple[Tensor, ...]] = []
    for x, y in zip(*batch(0), strict=True):
        loss(used_thrice(x, one, one, one), y).backward()
        found.append(torch.autograd.grad(loss(used_thrice(x, *copies), y), copies))
    ruled = reduce(add, [(late + middle) + early for early, middle, late in found])
    early, middle, late = (reduce(add, each) for each in zip(*found, strict=True))
    assert torch.equal(one.grad, ruled)
    assert not torch.equal(one.grad, (late + middle) + early)


@pytest.mark.parametrize("tied", ["microbatch", "step"])
@pytest.mark.parametrize("cut", [[1, 3], [1, 2, 3, 4], [4], [2]], ids=str)
def test_stages_that_share_a_parameter_train_it_as_one(cut: list[int], tied: Tied) -> None:
    wanted = plain(tied, cut)
    parts = cut_model(model(), cut)
    ties = ties_of(parts)
    stages = [part.stage(optimizer=ADAM, loss=loss if part is parts[-1] else None) for part in parts]
    shared = SharedGradients()
    for step in range(STEPS):
        for number, (x, y) in enumerate(zip(*batch(step), strict=True)):
            for stage in stages[:-1]:
                x = stage.forward(x, step=step, microbatch=number)
            stages[-1].forward(x, y, step=step, microbatch=number, share=1 / M)
            gone: dict[int, Tree] = {}
            gradient: tuple[Tree, ...] = ()
            for stage in reversed(stages):
                sent = bool(stage.shared) and tied == "microbatch"
                roots = shared.of(stage).roots(of_later(gone, stage, ties)) if sent else []
                gradient = (stage.backward(*gradient, step=step, microbatch=number, roots=roots),)
                gone[stage.index] = shared.of(stage).leaving() if sent else None
        for stage in reversed(stages) if tied == "step" else ():
            if stage.shared:
                gone[stage.index] = shared.of(stage).subtotal(of_later(gone, stage, ties))
        given: dict[int, Tree] = {}
        for stage in stages:
            totals = [given[lower] for lower, upper in ties if upper == stage.index]
            given[stage.index] = shared.of(stage).exchange(*totals) if stage.shared else None
            stage.update()
    found = {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def of_later(gone: dict[int, Tree], stage: Stage, ties: tuple[tuple[int, int], ...]) -> Tree:
    """Gradients that the neighbour after `stage` has sent."""
    return next((gone[upper] for lower, upper in ties if lower == stage.index), None)


def first_and_last() -> tuple[tuple[Stage, TiedGradients], tuple[Stage, TiedGradients]]:
    first, _, last = [part.stage(optimizer=ADAM, loss=loss) for part in cut_model(model(), [2, 4])]
    shared = SharedGradients()
    return (first, shared.of(first)), (last, shared.of(last))


def test_a_microbatch_that_is_left_out_has_no_gradient_to_send() -> None:
    (first, owned), (last, used) = first_and_last()
    last.backward(None, step=0, microbatch=0)
    assert used.leaving() == {TITLE: None}
    first.backward(None, step=0, microbatch=0, roots=owned.roots({TITLE: None}))
    assert owned.exchange() == {TITLE: None}


def test_a_gradient_counts_although_the_earlier_stage_has_none_of_its_own() -> None:
    (first, owned), _ = first_and_last()
    first.backward(None, step=0, microbatch=0, roots=owned.roots({TITLE: torch.ones(WORDS, WIDTH)}))
    assert torch.equal(owned.exchange()[TITLE], torch.ones(WORDS, WIDTH))


@pytest.mark.parametrize(
    ("tied", "told"),
    [
        (torch.ones(2), "got float32 [2] for the parameters that it shares; expected a dict of gradients, for"),
        ({"1.bias": None}, "got {1.bias: None} for the parameters"),
        ({TITLE: torch.ones(2)}, f"a gradient of float32 [2] for {TITLE}, which is float32 [{WORDS}, {WIDTH}]"),
    ],
)
def test_gradients_of_something_else_are_refused(tied: object, told: str) -> None:
    (_, owned), _ = first_and_last()
    with pytest.raises(GradientMismatch) as refused:
        owned.roots(tied)
    assert told in str(refused.value)
