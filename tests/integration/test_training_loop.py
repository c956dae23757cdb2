"""All that training loops have, at once: clipping, several batches in a step, bfloat16, groups, rate schedules."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from stageline import Line
from support.plain_loop import PlainLoop, differing
from support.small_models import SMALL_MODELS
from support.workspace import Workspace

STEPS, MICROBATCHES, ACCUMULATE = 6, 2, 3
SIZES = (5, 8, 6) * STEPS  # rows of the batches
MOST = 0.3
ADAM = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
HALVED = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)

pytestmark = pytest.mark.usefixtures("one_thread")


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    plain = [parameter for name, parameter in named if name.endswith(".bias") or "norm" in name]
    decayed = [parameter for name, parameter in named if not (name.endswith(".bias") or "norm" in name)]
    return ADAM([{"params": decayed}, {"params": plain, "weight_decay": 0.0}])


@pytest.mark.parametrize("workers", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_all_together_are_what_one_plain_loop_does(name: str, workers: Any, workspace: Workspace) -> None:
    small, model = SMALL_MODELS[name], SMALL_MODELS[name].build()
    batches = [small.batch(number, rows) for number, rows in enumerate(SIZES)]
    optimizer = _adam(model)
    plain = PlainLoop(
        model,
        small.loss,
        optimizer,
        MICROBATCHES,
        accumulate=ACCUMULATE,
        autocast=True,
        lr_scheduler=HALVED(optimizer),
        lr_every=2,
        clip_norm=MOST,
    ).train(batches)
    with Line(
        small.build(),
        cut=small.cut,
        loss=small.loss,
        optimizer=ADAM,
        microbatches=MICROBATCHES,
        accumulate=ACCUMULATE,
        autocast="bf16",
        groups=[{"match": ["*.bias", "*norm*"], "weight_decay": 0.0}],
        lr_scheduler=HALVED,
        lr_every=2,
        clip_norm=MOST,
        workers=workers,
        folder=workspace.folder,
    ) as line:
        steps = [batches[first : first + ACCUMULATE] for first in range(0, len(batches), ACCUMULATE)]
        losses = [line.step(*zip(*step, strict=True)) for step in steps]
        assert [loss.item() for loss in losses] == plain.losses
        assert [loss.gradient_norm for loss in losses] == plain.norms
    assert not differing(line.state_dict(), plain.state())
