"""Models that are no nn.Sequential train as plain `model(**inputs)` does, to the bit, wherever they are cut."""

import contextlib
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from stageline import Line
from stageline.pipeline.schedule import Placement
from stageline.workers.runs.folder import result_in
from support.shapes import looped
from support.whole_models import ADAM, WHOLE_MODELS, mean_loss, train_whole
from support.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, MICROBATCHES = 2, 4
PLACEMENTS = {2: looped(1, 2), 3: looped(1, 3), 4: looped(2, 2)}  # for interleaving
FAMILIES = ("gpt2", "llama", "bert", "layoutlm", "vit", "resnet18")
DECIDING = ("gpt2", "resnet18", "u-net")  # one of transformers, which takes seconds to import


@cache
def reference(name: str, steps: int = STEPS) -> tuple[dict[str, torch.Tensor], list[float]]:
    return train_whole(WHOLE_MODELS[name], steps, MICROBATCHES)


def cases() -> Iterator[Any]:
    for name, whole in WHOLE_MODELS.items():
        for stages, cuts in whole.cuts.items():
            for cut in cuts:
                for schedule, placement in (("1f1b", None), ("interleaved-1f1b", PLACEMENTS[stages])):
                    deciding = stages == 4 and cut is cuts[0] and placement and name in DECIDING
                    marks = () if deciding else pytest.mark.slow
                    yield pytest.param(name, cut, schedule, placement, marks=marks, id=f"{name}-{cut}-{schedule}")


@pytest.mark.parametrize(("name", "cut", "schedule", "placement"), list(cases()))
def test_a_model_trains_as_it_does_unsplit(
    name: str, cut: list[int | str], schedule: str, placement: Placement | None
) -> None:
    whole, (state, losses) = WHOLE_MODELS[name], reference(name)
    with Line(
        whole.layers(whole.made()),
        cut=cut,
        placement=placement,
        schedule=schedule,
        loss=mean_loss,
        optimizer=ADAM,
        microbatches=MICROBATCHES,
        workers="inline",
    ) as line:
        found = [line.step(x, y).item() for x, y in whole.batches(STEPS)]
    trained = line.state_dict()
    assert found == losses
    assert trained.keys() == state.keys()
    assert all(torch.equal(trained[key], value) for key, value in state.items())


@pytest.mark.parametrize("name", ["u-net", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)])
def test_a_worker_that_is_killed_changes_no_bit(name: str, workspace: Workspace) -> None:
    whole, (state, losses) = WHOLE_MODELS[name], reference(name, 6)
    with (
        contextlib.chdir(workspace.folder),
        Line(
            whole.layers(whole.made()),
            cut=whole.cuts[2][0],
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
                os.kill(worker(workspace, 1), signal.SIGKILL)
    trained = line.state_dict()
    assert [loss.item() for loss in found] == losses
    assert all(torch.equal(trained[key], value) for key, value in state.items())
    assert result_in(workspace.runs()[0]).restarts == 1


def worker(workspace: Workspace, index: int) -> int:
    """Its pid."""
    logs = {pid: (Path("/proc") / str(pid) / "fd" / "2").readlink().name for pid in workspace.processes()}
    return next(pid for pid, log in logs.items() if log == f"worker-{index}.log")


def test_dropout_moves_the_bits_of_the_reference() -> None:
    """So layers that were seeded otherwise would not give them."""
    state, _ = train_whole(WHOLE_MODELS["u-net"], STEPS, MICROBATCHES, seed=1)
    assert not all(torch.equal(reference("u-net")[0][key], value) for key, value in state.items())
