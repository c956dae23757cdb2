"""Claim: being able to lose any process costs a few percent, and memory that `stageline plan` has told before.

The largest workload with recovery as it is by default (a snapshot every 20 steps, written beside the computing) and
without; and the bytes of messages that the workers retained at most, beside the plan's figure.
"""

import os
from dataclasses import replace
from functools import partial

from stageline.pipeline.plan import read_plan
from stageline.workers.preflight.estimate import estimate

from .finding import BenchmarkResult, Table
from .rounds import Spread, alternate
from .trainers import ours
from .workload import WORKLOADS, Workload

ON, OFF = "recovery on", "recovery off"
RECOVERY = {ON: "recovery.restarts=5", OFF: "recovery.restarts=0"}

ABOUT = """\
The largest of the workloads above, {steps} steps of which the last {timed} count: by then the process that stands ready
for a loss has been loaded. With recovery on, as it is by default, each stage writes a snapshot every 20 steps. Both
take turns; rates are steps per second as `min / median / max` over the rounds, the ratio is the median of those within
each round. Retained are the bytes of messages that the workers have reported at most, together, and what
`stageline plan` says before the run."""


def measure(rounds: int) -> BenchmarkResult:
    workload = replace(WORKLOADS[-1], warm=60, timed=60)
    timings = alternate({name: partial(ours.train, workload, [key]) for name, key in RECOVERY.items()}, rounds)
    rates = {name: Spread(tuple(t.steps_per_second(workload.warm) for t in runs)) for name, runs in timings.items()}
    retained = {name: max(run.retained for run in runs) for name, runs in timings.items()}
    told = {name: _told(workload, key) for name, key in RECOVERY.items()}
    rows = tuple(
        (
            name,
            f"{rates[name].low:.3g} / {rates[name].middle:.3g} / {rates[name].high:.3g}",
            f"{(rates[name] / rates[OFF]).middle:.3f}",
            f"{retained[name] / 2**20:.1f}",
            f"{told[name] / 2**20:.1f}",
        )
        for name in RECOVERY
    )
    columns = ("", "steps/s", "to off", "retained, MiB", "as planned, MiB")
    facts = {"steps_per_second": {name: rate.rounds for name, rate in rates.items()}, "retained": retained}
    about = ABOUT.format(steps=workload.steps, timed=workload.timed)
    return BenchmarkResult(
        "Recovery", about, (Table(str(workload), columns, rows),), {"recovery": facts | {"planned": told}}
    )


def _told(workload: Workload, key: str) -> int:
    plan = read_plan(ours.PLAN, sets=[*ours.settings(workload, "runs"), key], environment=os.environ)
    return sum(queue.retained for queue in estimate(plan).queues)
