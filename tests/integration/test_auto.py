"""Whole runs that choose their schedule: over slow links, or where backwards in halves pay, it changes, and the weights
do not, also if processes are killed."""

import os
import signal
from pathlib import Path
from typing import Any

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
    ids=["none", "workers", "a worker and the broker"],
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


HALVES = """
import torch
from time import sleep
from torch import nn

class Waits(torch.autograd.Function):
    @staticmethod
    def forward(context, x, there, back):
        context.back = back
        sleep(there)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        sleep(context.back)
        return gradient, None, None

class Halved(nn.Linear):
    # Takes so long forward, for the gradient of its input, and for that of its weight.
    def forward(self, x):
        weight = Waits.apply(self.weight, 0.0, {seconds})
        return Waits.apply(nn.functional.linear(x, weight, self.bias), {seconds}, {seconds})

def build():
    return nn.Sequential(Halved(5, 8), nn.Dropout(0.2), Halved(8, 8), nn.BatchNorm1d(8), Halved(8, 3))
"""
HALVED_STEPS = 40


def halved_plan(home: Path, seconds: float) -> Path:
    """The tiny plan with layers whose halves of a backward take equally long."""
    plan = plan_in(home)
    with (plan.parent / "model.py").open("a") as file:
        file.write(HALVES.format(seconds=seconds))
    return plan


@pytest.mark.slow
def test_where_halves_of_backwards_pay_a_run_takes_them_and_a_worker_that_is_killed_then_changes_no_bit(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    sets = ("schedule.microbatches=6", "data.batch_size=12", f"run.steps={HALVED_STEPS}", "model.cut=[2, 4]")
    plain = WholeRun(fork_server, halved_plan(tmp_path / "plain", 0.0), *sets).digest()
    going = WholeRun(fork_server, halved_plan(tmp_path, 0.012), *sets, *AUTO)

    def split() -> dict[str, Any] | None:
        given = going.facts("status")["orders"]["orders"] if going.entries() else []
        return next((each for each in given if each["name"] == "zb-h1"), None)

    changed = going.wait_for(split)
    assert changed["why"].startswith("to measure the two halves of backwards: with the times of steps 1 to 4")
    going.until(lambda entry: entry.step >= changed["step"] + 2)
    os.kill(going.facts("status")["workers"][1]["pid"], signal.SIGKILL)
    assert going.digest() == plain
    assert "the schedule stays: with the times of steps" in going.log("broker")
