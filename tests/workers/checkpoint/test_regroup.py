"""Stages' states are regrouped by the names of what they keep: for another cut, to the bits that it would have had."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from stageline.pipeline.errors import ForeignState
from stageline.pipeline.features.ties import SharedGradients
from stageline.pipeline.model.cut import cut_model
from stageline.pipeline.model.segment import layouts_of
from stageline.pipeline.model.stage_layout import StageLayout
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.stage_state import StageState
from stageline.pipeline.tree import Tree
from stageline.workers.checkpoint.regroup import Contents, faults_of, regrouped, shares_of
from support.states import difference
from support.training_stages import Counting

pytestmark = pytest.mark.usefixtures("one_thread")

ADAM = partial(torch.optim.AdamW, lr=0.01)
STEP_LR = partial(lr_scheduler.StepLR, step_size=2)
STEPS = 3


def decayed(parameters: Any) -> torch.optim.Optimizer:
    """Biases first, without decay: the optimizer numbers parameters in an order of its own."""
    every = list(parameters)
    biases = [each for each in every if each.dim() == 1]
    return torch.optim.SGD(
        [{"params": biases}, {"params": [each for each in every if each.dim() > 1], "weight_decay": 0.1}],
        lr=0.1,
        momentum=0.9,
    )


def model() -> nn.Sequential:
    torch.manual_seed(0)
    frozen = nn.Linear(6, 6).requires_grad_(False)
    first, norm, later = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
    later.weight = first.weight  # in one stage or in two
    layers = [Counting(), first, nn.Dropout(0.3), norm, frozen, later, nn.ReLU(), nn.Linear(6, 3)]
    return nn.Sequential(*layers)


def trained(cut: Sequence[int], optimizer: Any) -> tuple[list[StageState], list[StageLayout]]:
    """The stages' states after some steps, and their layouts before the first."""
    segments = cut_model(model(), list(cut)) if cut else cut_model(model(), stages=1)
    layouts = layouts_of(segments, optimizer)
    cross_entropy = nn.functional.cross_entropy
    stages = [
        part.stage(
            optimizer=optimizer,
            loss=cross_entropy if part is segments[-1] else None,
            settings=StageSettings(lr_scheduler=STEP_LR, ema_decay=0.9),
        )
        for part in segments
    ]
    shared = SharedGradients()
    for step in range(STEPS):
        for microbatch in range(2):
            _run(stages, shared, {"step": step, "microbatch": microbatch})
        totals: Tree = None
        for stage in stages:
            if stage.shared:
                totals = shared.of(stage).exchange(totals)
            stage.update()
    return [stage.snapshot() for stage in stages], layouts


def _run(stages: Sequence[Stage], shared: SharedGradients, at: dict[str, int]) -> None:
    """One microbatch through all stages and back."""
    generator = torch.Generator().manual_seed(10 * at["step"] + at["microbatch"])
    x, target = torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
    for stage in stages[:-1]:
        x = stage.forward(x, **at)
    stages[-1].forward(x, target, share=0.5, **at)
    given: tuple[Any, ...] = ()
    tied: Tree = None
    for stage in stages[::-1]:
        roots = shared.of(stage).roots(tied) if stage.shared else []
        given = (stage.backward(*given, roots=roots, **at),)
        tied = shared.of(stage).leaving() if stage.shared else tied


def contents(states: Sequence[StageState]) -> dict[int, Contents]:
    return {
        stage: Contents(
            {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in state.weights.items()},
            frozenset(state.buffers),
        )
        for stage, state in enumerate(states)
    }


@pytest.mark.parametrize("optimizer", [ADAM, decayed])
@pytest.mark.parametrize(("before", "after"), [([1, 3, 5], [2]), ([4], [1, 3, 6]), ([2], []), ([], [5])])
def test_what_the_stages_keep_is_what_stages_of_another_cut_have_come_to(
    before: list[int], after: list[int], optimizer: Callable[..., Any]
) -> None:
    states, _ = trained(before, optimizer)
    wanted, layouts = trained(after, optimizer)
    shares = shares_of(layouts, contents(states), len(states))
    assert not faults_of(shares, contents(states))
    for share, state in zip(shares, wanted, strict=True):
        assert not difference(regrouped(share, [states[old] for old in share.sources]), state)


def test_another_model_is_named_with_the_nearest_names_and_both_forms() -> None:
    states, _ = trained([4], ADAM)
    other = nn.Sequential(*model()[:-1], nn.Linear(6, 4), nn.LayerNorm(4))
    layouts = layouts_of(cut_model(other, stages=1), ADAM)
    faults = faults_of(shares_of(layouts, contents(states), 2), contents(states))
    assert faults[:2] == ["8.weight is missing", "8.bias is missing"]
    assert faults[2:] == [
        "7.weight is float32 [3, 6] there, the model wants float32 [4, 6]",
        "7.bias is float32 [3] there, the model wants float32 [4]",
    ]


def test_what_a_stage_has_once_must_be_the_same_in_all_that_become_one() -> None:
    states, _ = trained([4], ADAM)
    _, layouts = trained([], ADAM)
    (share,) = shares_of(layouts, contents(states), 2)
    group = states[0].optimizer["param_groups"][0]  # type: ignore[index]
    slower = replace(states[0], optimizer={**states[0].optimizer, "param_groups": [{**group, "lr": 7.0}]})  # type: ignore[dict-item]
    later = replace(states[0], lr_scheduler={**states[0].lr_scheduler, "last_epoch": 9})  # type: ignore[dict-item]
    for odd, reason in (
        (slower, "one group have different lr"),
        (later, "scheduler of stage 0"),
    ):
        with pytest.raises(ForeignState, match=reason):
            regrouped(share, [odd, states[1]])


def test_of_the_stages_that_share_a_name_a_new_one_takes_one_that_it_needs_anyway() -> None:
    """It asked for the last of them, which may be on another machine."""
    form = ("float32", (2,))
    has = (("tied", "0"), ("1",), ("tied", "2"))
    old = {stage: Contents(dict.fromkeys(names, form), frozenset()) for stage, names in reversed([*enumerate(has)])}
    wanted = (("tied", "0"), ("tied",), ("tied", "1", "2"))
    new = [StageLayout(stage, (), (), names, (), {}, None, {}) for stage, names in enumerate(wanted)]
    assert [share.sources for share in shares_of(new, old, 3)] == [(0,), (0,), (1, 2)]
