"""Kill anything: SIGKILL between two actions of real processes, and the weights are the undisturbed run's.

A reduced sweep. Every trial says where it kills; that the kill really came shows in the count of replaced workers.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import reference
from nursery import Kill, Nursery
from redis_server import RedisServer

STEPS, MICROBATCHES = 12, 3
RECOVERY = ("recovery.restarts=5", "recovery.snapshot_every=3", "run.log_every=1")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    started = Nursery()
    yield started
    started.close()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> reference.Result:
    recipe = reference.recipe(reference.EXAMPLES / "digits", steps=STEPS, microbatches=MICROBATCHES)
    return reference.train(recipe)


def places(stages: int, count: int) -> list[list[Kill]]:
    """Kills of one worker, spread over its actions: 2 * M + 1 a step."""
    chance = random.Random(stages)
    actions = STEPS * (2 * MICROBATCHES + 1)
    return [
        [(f"worker-{chance.randrange(stages)}", actions * number // count + chance.randrange(1, actions // count))]
        for number in range(count)
    ]


def trial(nursery: Nursery, tmp_path: Path, stages: int, kills: list[Kill], url: str = "ipc://") -> dict:
    cut = {2: [6], 4: [2, 5, 8]}[stages]
    sets = (
        f"run.steps={STEPS}",
        f"schedule.microbatches={MICROBATCHES}",
        f"model.cut={cut}",
        f"queues.url={url}",
        f"run.dir={tmp_path}",
        *(f"workers.{stage}.stages=[{stage}]" for stage in range(stages)),
        *RECOVERY,
    )
    return nursery.train(
        reference.EXAMPLES / "digits" / "stageline.toml", *sets, folder=tmp_path / tmp_path.name, kills=kills
    )


def check(outcome: dict, expected: reference.Result, replaced: int) -> None:
    facts = outcome["facts"]
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    assert facts["restarts"] == replaced
    assert facts["weights_sha256"] == expected.weights_sha256
    assert list(facts["losses"].values()) == expected.losses


@pytest.mark.parametrize("kills", places(2, 8), ids=str)
def test_a_worker_killed_anywhere_changes_nothing(kills, nursery, expected, tmp_path):
    check(trial(nursery, tmp_path, 2, kills), expected, replaced=1)


@pytest.mark.parametrize("kills", places(4, 6), ids=str)
def test_one_of_four_workers_killed_anywhere_changes_nothing(kills, nursery, expected, tmp_path):
    check(trial(nursery, tmp_path, 4, kills, "tcp://127.0.0.1:0"), expected, replaced=1)


@pytest.mark.parametrize("kills", places(2, 6), ids=str)
def test_over_redis_a_worker_killed_anywhere_changes_nothing(kills, nursery, redis, expected, tmp_path):
    check(trial(nursery, tmp_path, 2, kills, redis.url), expected, replaced=1)


@pytest.mark.parametrize("action", [1, 20, 41, 63])
def test_all_workers_killed_at_about_the_same_time_change_nothing(action, nursery, expected, tmp_path):
    kills = [("worker-0", action), ("worker-1", action + 1)]
    check(trial(nursery, tmp_path, 2, kills), expected, replaced=2)


def test_neighbours_killed_together_change_nothing(nursery, expected, tmp_path):
    kills = [("worker-1", 30), ("worker-2", 30)]
    check(trial(nursery, tmp_path, 4, kills), expected, replaced=2)


@pytest.mark.parametrize("sentences", [1, 3, 6, 12])
def test_a_killed_broker_is_started_again_and_training_goes_on(sentences, nursery, expected, tmp_path):
    check(trial(nursery, tmp_path, 2, [("broker", sentences)]), expected, replaced=0)


def test_broker_and_worker_killed_in_one_run_change_nothing(nursery, expected, tmp_path):
    check(trial(nursery, tmp_path, 2, [("broker", 5), ("worker-0", 35)]), expected, replaced=1)
