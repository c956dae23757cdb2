"""Whole runs that choose their schedule: over slow links it changes, and the weights do not, whoever is killed."""

from pathlib import Path

import pytest

from support.fork_server import ForkServer, Kill
from support.paths import ROOT
from support.whole_run import WholeRun, plan_in

STEPS = 14
OF_STEP = 13  # actions of a worker: 6 forwards, 6 backwards, and the update
AUTO = (
    "schedule.name=auto",
    "schedule.memory=100MiB",
    "schedule.microbatches=6",
    "data.batch_size=12",
    "queues.url=tcp://127.0.0.1:0",
)
SLOW_LINKS = f"""
import sys
sys.path.append({str(ROOT)!r})
from benchmarks.latency.delayed_link import delay_links
delay_links(0.03)
"""


def slow_plan(home: Path) -> Path:
    """The tiny plan, cut in three, over links of 30 ms."""
    plan = plan_in(home)
    with (plan.parent / "model.py").open("a") as file:
        file.write(SLOW_LINKS)
    return plan


def run_of(plan: Path, fork_server: ForkServer, *kills: Kill) -> WholeRun:
    return WholeRun(fork_server, plan, *AUTO, f"run.steps={STEPS}", "model.cut=[2, 4]", kills=kills)


def weights_by_1f1b(fork_server: ForkServer, home: Path) -> str:
    sets = ("schedule.microbatches=6", "data.batch_size=12", f"run.steps={STEPS}", "model.cut=[2, 4]")
    return WholeRun(fork_server, plan_in(home), *sets).digest()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [
        [],
        [("worker-1", 3 * OF_STEP + 5), ("worker-2", 12 * OF_STEP + 5)],  # while it is measured; and by the new order
        [("worker-0", 11 * OF_STEP + 3), ("broker", 40)],
    ],
    ids=["nobody", "workers", "a worker and the broker"],
)
def test_over_slow_links_the_schedule_changes_and_no_bit_does_whoever_is_killed(
    kills: list[Kill], fork_server: ForkServer, tmp_path: Path
) -> None:
    plain = weights_by_1f1b(fork_server, tmp_path / "plain")
    going = run_of(slow_plan(tmp_path), fork_server, *kills)
    assert going.digest() == plain
    log = going.log("broker")
    assert "another schedule from about step" in log
    assert "the schedule is" in log
