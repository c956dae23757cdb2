"""SIGKILL between any two actions of real processes: the weights are those of the undisturbed run.

A small part of the trials of `make faults`; `sweep.py` says how to read their names.
"""

from pathlib import Path
from typing import Any

import pytest

from faults import trial
from faults.sweep import MICROBATCHES, STEPS, Trial, all_trials
from support import action_log, reference
from support.fork_server import ForkServer
from support.redis_server import shared_server

SOME = """
    ipc/2/worker-0@1  redis/4/worker-0@16+worker-1@16
    tcp/2/broker@9+worker-0@15+worker-1@15
"""
MORE = """
    tcp/4/worker-2@2  redis/2/worker-0@22  ipc/2/worker-0@12+worker-1@12  tcp/4/broker@7
    ipc/2/worker-1@13  ipc/2/worker-0@32  redis/4/worker-3@26
    tcp/4/worker-1@20+worker-2@20  redis/2/worker-0@25+worker-0@7
    ipc/2/broker@1  ipc/2/broker@5+worker-0@20
    ipc/4/worker-0@10+worker-1@10+worker-2@10+worker-3@10
    ipc/2/worker-1@14+worker-1@3
"""


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trial.run(fork_server, Trial("ipc", 2, ()), tmp_path_factory.mktemp("undisturbed") / "tiny")


def test_the_undisturbed_run_is_what_plain_torch_computes(undisturbed: dict[str, Any]) -> None:
    expected = reference.train(reference.recipe(trial.PLAN.parent, steps=STEPS, microbatches=MICROBATCHES))
    assert undisturbed["facts"]["weights_sha256"] == expected.weights_sha256
    assert list(undisturbed["facts"]["losses"].values()) == expected.losses
    assert undisturbed["orphans"] == undisturbed["left"] == []


@pytest.mark.parametrize(
    "name", [*SOME.split(), *(pytest.param(name, marks=pytest.mark.slow) for name in MORE.split())]
)
def test_a_run_whose_processes_are_killed_ends_as_the_undisturbed_run(
    name: str, fork_server: ForkServer, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    this = Trial.parse(name)
    redis = shared_server()
    outcome = trial.run(fork_server, this, tmp_path / "tiny", redis.tcp_url_of(redis.own_number()))
    verdict = trial.judge(this, outcome, action_log.read(tmp_path / "tiny"), undisturbed)
    assert verdict.wrong == []
    assert verdict.fired == len(this.kills)


def test_a_trial_that_loses_bits_or_leaves_something_behind_is_detected(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    this = Trial("ipc", 2, (("worker-0", 3),))
    facts = {**undisturbed["facts"], "weights_sha256": "other"}
    entries = [
        action_log.Entry("worker-0", 0, action_log.DONE, 0.0, 1, "0F0"),
        action_log.Entry("broker", 0, action_log.CHECKPOINT, 0.5, 2),
        action_log.Entry("worker-0", 0, action_log.KILLED, 1.0),
        action_log.Entry("worker-0", 1, action_log.ACTION, 1.5, 1, "0F0"),
        action_log.Entry("worker-0", 1, action_log.DONE, 2.0, 1, "0F0"),
    ]
    verdict = trial.judge(this, {**undisturbed, "facts": facts, "left": ["socket"]}, entries, undisturbed)
    assert [reason.split()[0] for reason in verdict.wrong] == ["weights_sha256", "left:", "worker-0", "0"]
    assert (verdict.fired, verdict.recoveries, verdict.redone) == (1, [0.5], 1)


def test_the_name_of_a_trial_holds_all_of_it() -> None:
    trials = all_trials()
    assert len(trials) > 1000
    assert [Trial.parse(str(each)) for each in trials] == trials
    assert len(set(trials)) == len(trials)
