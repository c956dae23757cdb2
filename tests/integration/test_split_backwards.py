"""Runs whose backwards have two halves: the plain loop's bits, whatever fails or is killed between the halves."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from stageline.pipeline.schedule import Kind, make_schedule
from stageline.workers.extras.recording.replay import ReplayTarget, replay
from support import reference
from support.fork_server import ForkServer
from support.paths import EXAMPLES
from support.workspace import MODEL, Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, MICROBATCHES, ROWS = 4, 4, 10


DIGITS = {"run.steps": 6, "data.batch_size": 40, "model.options.width": 8}
CUT = [4, 9]


def halfway(worker: int) -> tuple[str, int]:
    """After which of its actions a worker has sent the gradient of a microbatch, and not computed those of weights."""
    actions = make_schedule("zb-h1", [[0], [1], [2]], MICROBATCHES).workers[worker]
    place = max(place for place, action in enumerate(actions) if action.kind is Kind.INPUT)
    return f"worker-{worker}", 3 * len(actions) + place + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills", [[halfway(0)], [halfway(1)], [halfway(2), halfway(1)]], ids=["first", "middle", "last and middle"]
)
def test_workers_are_killed_between_the_halves(
    kills: list[tuple[str, int]], fork_server: ForkServer, tmp_path: Path
) -> None:
    sets = {
        **DIGITS,
        "run.dir": tmp_path,
        "model.cut": CUT,
        "schedule.name": "zb-h1",
        "schedule.microbatches": MICROBATCHES,
        "recovery.snapshot_every": 2,
        "recovery.restarts": 3,
        "recovery.record": "all",
        **{f"workers.{worker}.stages": [worker] for worker in range(3)},
    }
    folder = EXAMPLES / "digits"
    outcome = fork_server.train(
        folder / "stageline.toml",
        *(f"{key}={value}" for key, value in sets.items()),
        folder=tmp_path / "run",
        kills=kills,
    )
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert outcome["facts"]["weights_sha256"] == reference.reference_digest(
        folder, microbatches=MICROBATCHES, changes=DIGITS
    )
    for stage in range(3):
        again = replay(tmp_path / "run", ReplayTarget(stage, 5, 1))
        assert [each.action for each in again.outcomes] == [f"{stage}F1", f"{stage}I1", f"{stage}W1"]
        assert again.reproduced


POISON = f"""{MODEL}
import torch

class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows):
        ctx.rows = rows
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.rows == 1:
            raise ValueError("one row only")
        return gradient, None

class Input(nn.Linear):
    def forward(self, x):
        return super().forward(Refusing.apply(x, len(x)))

class Weight(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, Refusing.apply(self.weight, len(x)), self.bias)

def build_input():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Input(8, 2))

def build_weight():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Weight(8, 2))
"""


@pytest.mark.parametrize("half", ["input", "weight"])
def test_a_microbatch_that_fails_in_either_half_is_recorded_and_can_be_run_again(
    half: str, workspace: Workspace, capfd: Any
) -> None:
    workspace.write("model.py", POISON)
    sets = ("queues.url=memory://", "schedule.name=zb-h1", f"model.factory=model.py:build_{half}")
    assert workspace.here("train", ".", *(word for each in sets for word in ("--set", each))) == 1
    said = capfd.readouterr().err
    assert f"stage 1 failed in 1{half[0].upper()}0 of step 5" in said
    assert "ValueError: one row only" in said
    (command,) = [line for line in said.splitlines() if "stageline replay" in line]
    assert workspace.here(*shlex.split(command.partition("stageline ")[2])) == 0
    assert f"stage 1 failed in 1{half[0].upper()}0 of step 5" in capfd.readouterr().out


CHECKPOINTED = f"""{MODEL}
import torch
from torch.utils.checkpoint import checkpoint

class Recomputing(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True) if torch.is_grad_enabled() else super().forward(x)

def build_reentrant():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Recomputing(8, 2))
"""


def test_the_plan_refuses_what_cannot_be_split(workspace: Workspace, capfd: Any) -> None:
    workspace.write("model.py", CHECKPOINTED)
    sets = ("queues.url=memory://", "model.factory=model.py:build_reentrant")
    words = [word for each in sets for word in ("--set", each)]
    assert workspace.here("train", ".", *words) == 0
    capfd.readouterr()
    assert workspace.here("train", ".", *words, "--set", "schedule.name=zb-h1") == 78
    said = capfd.readouterr().err
    assert "stage 1 cannot compute the gradients of its inputs before those of its weights" in said
    assert "use_reentrant=False" in said
