"""Claim: recovery costs a few percent of the speed, and the memory that `stageline plan` estimates.

The largest workload with recovery as it is by default (a snapshot every 20 steps, written while the stages compute)
and without; and the most bytes of messages that the workers retained, beside the plan's figure.
"""

import os
from dataclasses import replace
from functools import partial

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread, alternate
from benchmarks.trainers import ours
from benchmarks.workload import WORKLOADS, Workload
from stageline.pipeline.plan import read_plan
from stageline.workers.extras.preflight.trial import estimate

ON, OFF = "recovery on", "recovery off"
RECOVERY = {ON: "recovery.restarts=5", OFF: "recovery.restarts=0"}

ABOUT = """\
The largest of the workloads above, {steps} steps of which the last {timed} count: by then the process that is kept
ready to replace a lost worker has been loaded. With recovery on, as it is by default, each stage writes a snapshot
every 20 steps. Both take turns; rates are steps per second as `min / median / max` over the rounds, the ratio is the
median of those within each round. Retained is the most that all workers together have reported, in bytes of messages,
beside what `stageline plan` estimates."""


def measure(rounds: int) -> BenchmarkResult:
    workload = replace(WORKLOADS[-1], warm=60, timed=60)
    timings = alternate({name: partial(ours.train, workload, [key]) for name, key in RECOVERY.items()}, rounds)
    rates = {name: Spread(tuple(t.steps_per_second(workload.warm) for t in runs)) for name, runs in timings.items()}
    retained = {name: max(run.retained for run in runs) for name, runs in timings.items()}
    planned = {name: _planned(workload, key) for name, key in RECOVERY.items()}
    rows = tuple(
        (
            name,
            f"{rates[name].low:.3g} / {rates[name].middle:.3g} / {rates[name].high:.3g}",
            f"{(rates[name] / rates[OFF]).middle:.3f}",
            f"{retained[name] / 2**20:.1f}",
            f"{planned[name] / 2**20:.1f}",
        )
        for name in RECOVERY
    )
    columns = ("", "steps/s", "to off", "retained, MiB", "as planned, MiB")
    facts = {"steps_per_second": {name: rate.rounds for name, rate in rates.items()}, "retained": retained}
    about = ABOUT.format(steps=workload.steps, timed=workload.timed)
    return BenchmarkResult(
        "Recovery", about, (Table(str(workload), columns, rows),), {"recovery": facts | {"planned": planned}}
    )


def _planned(workload: Workload, key: str) -> int:
    plan = read_plan(ours.PLAN, sets=[*ours.settings(workload), key], environment=os.environ)
    return sum(queue.retained for queue in estimate(plan).queues)
