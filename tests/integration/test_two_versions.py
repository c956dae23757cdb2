"""Runs with two versions of the weights, in processes that are killed: the weights of the plain loop, to the bit."""

from pathlib import Path

import pytest

from stageline.workers.replay.replay import ReplayTarget, replay
from support import reference
from support.fork_server import ForkServer
from support.paths import EXAMPLES

STEPS, MICROBATCHES = 12, 4
SETS = (
    f"run.steps={STEPS}",
    "schedule.name=2bw",
    "schedule.mode=async",
    f"schedule.microbatches={MICROBATCHES}",
    "model.cut=[3, 8]",
    "workers.0.stages=[0]",
    "workers.1.stages=[1]",
    "workers.2.stages=[2]",
    "recovery.restarts=5",
    "recovery.snapshot_every=3",
)


def expected() -> str:
    recipe = reference.recipe(EXAMPLES / "digits", microbatches=MICROBATCHES, steps=STEPS)
    return reference.train_delayed(recipe).weights_sha256


@pytest.mark.parametrize(
    "kills",
    [
        {"worker-0": 70, "worker-2": 95},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"worker-1": 40}, marks=pytest.mark.slow),
        pytest.param({"worker-2": 61}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_killed_workers_come_to_the_weights_of_the_plain_loop(
    fork_server: ForkServer, tmp_path: Path, kills: dict[str, int]
) -> None:
    sets = (*SETS, f"run.dir={tmp_path}")
    plan = EXAMPLES / "digits" / "stageline.toml"
    outcome = fork_server.train(plan, *sets, folder=tmp_path / "run", kills=tuple(kills.items()))
    assert (outcome["code"], outcome["not killed"]) == (0, []), outcome["reason"]
    assert outcome["facts"]["weights_sha256"] == expected()
    assert outcome["facts"]["oddities"] == {}


@pytest.mark.slow
def test_microbatches_of_the_last_steps_have_their_bits_again(fork_server: ForkServer, tmp_path: Path) -> None:
    plan = EXAMPLES / "digits" / "stageline.toml"
    sets = (*SETS, f"run.dir={tmp_path}", "recovery.record=all")
    outcome = fork_server.train(plan, *sets, folder=tmp_path / "run", kills=(("worker-1", 80),))
    assert outcome["code"] == 0, outcome["reason"]
    for stage in range(3):
        for microbatch in range(MICROBATCHES):
            assert replay(tmp_path / "run", ReplayTarget(stage, STEPS - 2, microbatch)).reproduced
