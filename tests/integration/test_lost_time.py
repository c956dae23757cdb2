"""Real runs that lost time: `why` tells afterwards what that has cost, in words and in figures.

Where much else runs, a step may stand still for reasons of the machine: further stalls are no error.
"""

import json
import os
import signal
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from stageline.workers.cli.app import run
from support.fork_server import ForkServer
from support.whole_run import WholeRun, plan_in

STEPS = 40
OF_STEP = 13  # actions of a worker in a step of 6 microbatches
STILL = 4.0  # seconds: less than a lease, and more than a hiccup
SETS = ("schedule.microbatches=6", "data.batch_size=12", "recovery.snapshot_every=10", f"run.steps={STEPS}")

Captured = pytest.CaptureFixture[bytes]


def recovery(going: WholeRun, captured: Captured) -> dict[str, Any]:
    assert run(["why", str(going.folder), "--json"]) == 0
    told: dict[str, Any] = json.loads(captured.readouterr().out)["recovery"]
    return told


@pytest.mark.slow
def test_the_time_that_losses_of_a_worker_have_cost_is_told(
    fork_server: ForkServer, tmp_path: Path, capsysbinary: Captured
) -> None:
    kills = [("worker-1", 18 * OF_STEP), ("worker-1", 25 * OF_STEP)]
    going = WholeRun(fork_server, plan_in(tmp_path), *SETS, kills=kills)
    going.digest()
    told = recovery(going, capsysbinary)
    losses = [each for each in told["setbacks"] if each["what"] == "loss"]
    assert 1 <= len(losses) <= 2  # one, if the first was not over yet at the second
    for each in losses:
        assert each["workers"] == [1]
        assert 0 < each["waited"] <= each["seconds"] <= told["seconds"]
        assert "worker 1 was killed by SIGKILL" in each["text"]
    assert 0 < told["share"] < 1
    said = going.ask("why")
    assert told["text"] in said
    assert all(each["text"] in said for each in told["setbacks"])


@pytest.mark.slow
def test_a_step_in_which_a_worker_stood_still_is_told_as_a_stall(
    fork_server: ForkServer, tmp_path: Path, capsysbinary: Captured
) -> None:
    going = WholeRun(fork_server, plan_in(tmp_path), *SETS)
    going.until_checkpoint(10)
    (pid,) = (each["pid"] for each in going.facts("status")["workers"] if each["index"] == 0)
    os.kill(pid, signal.SIGSTOP)
    since = monotonic()
    going.wait_for(lambda: monotonic() - since > STILL)
    os.kill(pid, signal.SIGCONT)
    going.digest()
    stalls = [each for each in recovery(going, capsysbinary)["setbacks"] if each["what"] == "stall"]
    long = [each["text"] for each in stalls if each["seconds"] > STILL / 2]
    # In an action, before one, or while it waited for a message; that may be in the tail of the step before.
    assert any(said in text for text in long for said in ("worker 0 ", "no message came between stages 0 and 1")), (
        stalls
    )
