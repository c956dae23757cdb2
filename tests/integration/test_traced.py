"""Models that torch.export has traced train as plain `model(**inputs)` does, to the bit, wherever they are cut."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from stageline import Line, traced
from stageline.workers.runs.folder import result_in
from support.shapes import looped
from support.whole_models import ADAM, WHOLE_MODELS, WholeModel, mean_loss, train_whole
from support.workspace import Workspace

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

STEPS, MICROBATCHES = 2, 2
PLACEMENTS = {2: looped(1, 2), 3: looped(1, 3), 4: looped(2, 2)}  # for interleaving


MODELS = {name: WHOLE_MODELS[name] for name in ("resnet18", "u-net", "bert", "gpt2")}  # texts differ in length


@cache
def seeded(name: str) -> WholeModel:
    """The model, with the modules that are layers of its trace; the first of them begins with the model."""
    whole = MODELS[name]
    return replace(whole, seeded=("", *trace(name).names[1:]))


@cache
def trace(name: str) -> Any:
    whole = MODELS[name]
    return traced(whole.made(), whole.batches(1)[0][0])


@cache
def reference(name: str, steps: int = STEPS) -> tuple[dict[str, torch.Tensor], list[float]]:
    return train_whole(seeded(name), steps, MICROBATCHES)


def cases() -> Iterator[Any]:
    for name, whole in MODELS.items():
        for stages, cuts in whole.cuts.items():
            for cut, placement in zip(cuts, (None, PLACEMENTS[stages]), strict=True):
                yield pytest.param(name, cut, placement, id=f"{name}-{cut}")


@pytest.mark.parametrize(("name", "cut", "placement"), list(cases()))
def test_a_traced_model_trains_as_it_does_unsplit(name: str, cut: list[int | str], placement: Any) -> None:
    """One trace for all cuts: it begins each time with the same weights."""
    layers, (state, losses) = trace(name), reference(name)
    with Line(
        layers,
        cut=cut,
        placement=placement,
        schedule="interleaved-1f1b" if placement else "1f1b",
        loss=mean_loss,
        optimizer=ADAM,
        microbatches=MICROBATCHES,
        workers="inline",
    ) as line:
        line.load_state_dict(MODELS[name].made().state_dict())
        found = [line.step(x, y).item() for x, y in MODELS[name].batches(STEPS)]
    trained = line.state_dict()
    assert found == losses
    assert trained.keys() == state.keys()
    assert all(torch.equal(trained[key], value) for key, value in state.items())


def test_a_worker_that_is_killed_changes_no_bit(workspace: Workspace) -> None:
    """Its replacement has the graphs of the script, which traced the model once, before its processes were forked."""
    whole, (state, losses) = seeded("u-net"), reference("u-net", 6)
    with (
        contextlib.chdir(workspace.folder),
        Line(
            traced(whole.made(), whole.batches(1)[0][0]),
            cut=["down2", "up2"],
            folder=workspace.folder / "runs",
            loss=mean_loss,
            optimizer=ADAM,
            microbatches=MICROBATCHES,
            settings={"recovery.snapshot_every": 2},
        ) as line,
    ):
        found = []
        for step, (x, y) in enumerate(whole.batches(6)):
            found.append(line.step(x, y))
            if step == 3:
                found[-1].item()
                os.kill(workspace.worker(1), signal.SIGKILL)
    trained = line.state_dict()
    assert [loss.item() for loss in found] == losses
    assert all(torch.equal(trained[key], value) for key, value in state.items())
    assert result_in(workspace.runs()[0]).restarts == 1
