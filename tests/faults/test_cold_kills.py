"""SIGKILL in runs that are started as a user starts them: the weights are those of the undisturbed run.

A small part of the trials of `make faults`; `cold.py` says what is drawn.
"""

from pathlib import Path
from typing import Any

import pytest

from faults import cold_table, cold_trial
from faults.cold import ALL, BROKER, EACH, TRANSPORTS, WORKERS, ColdTrial, Moment, all_cold_trials
from faults.cold_trial import ColdOutcome
from support.redis_server import shared_server

FACTS = {"weights_sha256": "1f", "steps": 4, "loss": 0.5, "losses": {"0": 0.5}, "metrics": {"accuracy": 1.0}}
LOG = [
    (1.0, "run x: broker at ipc:///x, records in runs/x"),
    (2.0, "01:02:03 run x: all workers have joined"),
    (4.0, "01:02:05 worker 1 (stage 1), worker-1 (pid 8, host h), was killed by SIGKILL"),
    (4.5, "run x: broker at ipc:///x, records in runs/x"),
    (5.5, "01:02:06 worker 1 (stage 1) computes again, 1.4 s after its loss was detected"),
]


def test_the_trials_are_fifty_over_each_transport_and_kill_each_kind_of_process_at_each_moment() -> None:
    trials = all_cold_trials()
    assert [ColdTrial.parse(str(trial)) for trial in trials] == trials
    assert {name: sum(trial.transport == name for trial in trials) for name in TRANSPORTS} == dict.fromkeys(
        TRANSPORTS, EACH
    )
    for busy in (False, True):
        seen = {(trial.moment, trial.targets) for trial in trials if trial.busy is busy}
        assert {moment for moment, _ in seen} == set(Moment)
        assert {targets for _, targets in seen} >= {WORKERS, (BROKER,), ALL}
        assert {trial.spares for trial in trials if trial.busy is busy} == {0, 1}


def test_a_trial_is_judged_by_its_result_by_what_it_left_and_by_what_its_log_said_when() -> None:
    trial = ColdTrial("ipc", 0, ("worker-1", BROKER), Moment.FIRST, 1.0, spares=0, busy=False)
    undisturbed = _outcome()
    good = cold_trial.judge(trial, _outcome(kills={"worker-1": 3.0, BROKER: 3.5}), undisturbed)
    assert (good.wrong, good.workers, good.brokers) == ([], [2.5], [1.0])
    other = _outcome(facts={**FACTS, "weights_sha256": "2e"}, kills={"worker-1": 3.0}, left=["socket"])
    found = cold_trial.judge(trial, other, undisturbed).wrong
    assert [reason.split()[0] for reason in found] == ["left", "weights_sha256"]
    assert cold_trial.judge(trial, _outcome(), undisturbed).wrong == ["nothing was killed"]
    assert "ended with 1" in cold_trial.judge(trial, _outcome(code=1, kills={"worker-1": 3.0}), undisturbed).wrong[0]
    assert "| ipc | quiet | 1 | 2 | 2.50 s | 2.50 s | 1.00 s | 1.00 s |" in cold_table.tables([good])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ColdOutcome:
    return cold_trial.run(None, tmp_path_factory.mktemp("undisturbed"), "ipc://")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ipc/1", "tcp/2", "redis/0"])
def test_a_run_from_the_command_line_whose_processes_are_killed_ends_as_the_undisturbed_run(
    name: str, undisturbed: ColdOutcome, tmp_path: Path
) -> None:
    trial, redis = ColdTrial.parse(name), shared_server()
    urls = {"ipc": "ipc://", "tcp": "tcp://127.0.0.1:0", "redis": redis.tcp_url_of(redis.own_number())}
    outcome = cold_trial.run(trial, tmp_path / "run", urls[trial.transport])
    assert cold_trial.judge(trial, outcome, undisturbed).wrong == []


def _outcome(code: int = 0, **changes: Any) -> ColdOutcome:
    kept = {"facts": FACTS, "errors": "", "left": [], "kills": {}, "lines": LOG, "seconds": 6.0, **changes}
    return ColdOutcome(code, **kept)
