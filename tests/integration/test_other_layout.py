"""A run that is stopped goes on with other stages, workers and transport, to the bits of never having stopped."""

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support import reference
from support.redis_server import RedisServer
from support.workspace import Workspace, until, wait_for

MODEL = """
from time import sleep

from torch import nn


class Slow(nn.Module):
    seconds = 0.01  # so that a run is stopped long before its end

    def forward(self, x):
        sleep(self.seconds)
        return x


def build():
    return nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), Slow(),
        nn.Linear(8, 8), nn.Linear(8, 2)
    )


def other():
    return nn.Sequential(*build()[:-1], nn.Linear(8, 3))


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()
"""
PLAN = """
[run]
name = "small"
seed = 3
steps = {steps}
log_every = 50

[model]
factory = "model.py:build"
loss = "torch.nn.functional.cross_entropy"
metrics = ["model.py:accuracy"]

[data]
source = "data.py:batches"
batch_size = 8
check = false

[schedule]
microbatches = 3

[optimizer]
factory = "torch.optim.AdamW"
lr = 0.01

[lr_scheduler]
factory = "torch.optim.lr_scheduler.StepLR"
step_size = 40

[recovery]
snapshot_every = 10
"""
FOUR = ("--set", "model.cut=[1, 3, 6]", "--set", "workers.0.stages=[0, 2]", "--set", "workers.1.stages=[1, 3]")
TWO, ONE = ("--set", "model.stages=2", "--set", "schedule.name=gpipe"), ("--set", "model.stages=1")


@pytest.fixture
def here(workspace: Workspace) -> Workspace:
    workspace.write("model.py", MODEL)
    workspace.write("stageline.toml", PLAN.format(steps=120))
    return workspace


def stopped(workspace: Workspace, *arguments: str) -> tuple[Path, str]:
    """The folder of the run, and what was printed: it is stopped after some more steps than it began with."""
    train = workspace.start("train", ".", "--json", *arguments)
    _, printed = until(train.stderr, "logs in"), ""
    folder = max(workspace.runs(), key=lambda each: (each / "process.json").stat().st_mtime)
    before = {path.name for path in folder.glob("checkpoints/stage-0/step-*")}
    wait_for(lambda: {path.name for path in folder.glob("checkpoints/stage-0/step-*")} - before)
    train.send_signal(signal.SIGTERM)
    _, printed = train.communicate()
    assert train.returncode == 75, printed
    return folder, printed


@pytest.mark.slow
def test_four_stages_over_zeromq_go_on_as_two_over_redis_and_then_as_one(here: Workspace) -> None:
    first, _ = stopped(here, *FOUR, "--set", "schedule.name=interleaved-1f1b", "--set", "queues.url=ipc://")
    with RedisServer() as server:
        second, printed = stopped(
            here, "--resume", first.name, *TWO, "--set", f"queues.url=redis://127.1:{server.port}/0"
        )
        assert second.name.startswith(f"{first.name}-at")
        assert f"--resume {second.name}" in printed
    last = here.command("train", ".", "--json", "--resume", second.name, *ONE)
    assert last.returncode == 0, last.stderr
    found = json.loads(last.stdout)
    recipe = reference.recipe(here.folder, steps=120)
    expected = reference.train(recipe)
    assert found["weights_sha256"] == expected.weights_sha256
    assert found["losses"].keys() == {"0", "50", "100"}
    folder = here.folder / "runs" / found["run"]
    assert here.here("export", str(folder), "whole.safetensors") == 0
    model = recipe.build()
    model.load_state_dict(load_file(here.folder / "whole.safetensors"), strict=True)
    x, y = reference._load(here.folder, "data.py:batches")(batch_size=8, seed=0).held_out()
    model.eval()
    with torch.no_grad():
        parts = [
            (model(rows).argmax(1) == targets).float().mean().item() * len(rows)
            for rows, targets in zip(x.tensor_split(3), y.tensor_split(3), strict=True)  # its microbatches
        ]
    assert found["metrics"] == {"accuracy": sum(parts) / len(x)}


LATE = ("--set", "recovery.snapshot_every=1000")


def killed_early(workspace: Workspace, *arguments: str) -> None:
    """Kills all processes of a run while it trains, before any checkpoint."""
    train = workspace.start("train", ".", *arguments, *LATE)
    until(train.stderr, "logs in")
    until(train.stderr, "running")
    train.kill()
    train.communicate()
    wait_for(lambda: not workspace.kill())


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_again_in_another_layout_and_says_so(here: Workspace) -> None:
    """It was refused, since it holds no snapshot, where the same layout begins again."""
    killed_early(here, *FOUR)
    (first,) = here.runs()
    killed_early(here, "--resume", *TWO)
    (second,) = set(here.runs()) - {first}
    last = here.command("train", ".", "--json", "--resume", first.name, *TWO, *LATE)
    assert last.returncode == 0, last.stderr
    assert second.name in last.stderr
    found = json.loads(last.stdout)
    assert (found["run"], here.runs()) == (second.name, [first, second])
    assert found["weights_sha256"] == reference.train(reference.recipe(here.folder, steps=120)).weights_sha256
    third = here.command("train", ".", "--resume", first.name, *ONE, *LATE)
    assert third.returncode == 0, third.stderr
    assert f"{first.name} has no complete checkpoint" in third.stderr
    assert "step 0" in third.stderr


BEST = ("--set", "evaluation={every=10, better='higher', keep_best=true}")  # of the loss: an early one


@pytest.mark.slow
def test_the_best_checkpoint_moves_along_to_each_layout_and_the_older_folders_can_be_deleted(here: Workspace) -> None:
    """It lay in the old folder alone, and `export --best` of the new run failed."""
    first, _ = stopped(here, *FOUR, *BEST)
    second, _ = stopped(here, "--resume", first.name, *TWO, *BEST)
    shutil.rmtree(first)
    last = here.command("train", ".", "--json", "--resume", second.name, *ONE, *BEST)
    assert last.returncode == 0, last.stderr
    shutil.rmtree(second)
    found = json.loads(last.stdout)
    step = found["best"]["step"]
    assert step < int(second.name.partition("-at")[2].partition("-")[0])
    (third,) = here.runs()
    assert here.here("export", str(third), "best.safetensors", "--best") == 0
    best = load_file(here.folder / "best.safetensors")
    expected = reference.train(reference.recipe(here.folder, steps=step)).state
    assert best.keys() == expected.keys()
    assert all(torch.equal(best[name], expected[name]) for name in best)
    assert found["weights_sha256"] == reference.train(reference.recipe(here.folder, steps=120)).weights_sha256


FREEZING = ("--set", 'model.trainable=["3.*"]')


@pytest.mark.slow
def test_frozen_stages_go_on_where_they_are_cut_otherwise_but_with_the_same_parameters_trained(here: Workspace) -> None:
    """Stage 0 of four runs forward only, then one of two does both."""
    first, _ = stopped(here, *FREEZING, *FOUR)
    other = here.command("train", ".", "--resume", first.name, "--set", 'model.trainable=["6.*"]', *FOUR)
    assert other.returncode == 78
    assert 'model.trainable: ["6.*"] here, ["3.*"] there' in other.stderr
    last = here.command("train", ".", "--json", "--resume", first.name, *FREEZING, *TWO)
    assert last.returncode == 0, last.stderr
    recipe = reference.recipe(here.folder, steps=120)
    expected = reference.train(replace(recipe, build=partial(_frozen_but, recipe.build, "3.")))
    assert json.loads(last.stdout)["weights_sha256"] == expected.weights_sha256


def _frozen_but(build: Callable[[], Any], prefix: str) -> Any:
    model = build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(prefix))
    return model
