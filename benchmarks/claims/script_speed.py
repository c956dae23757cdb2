"""Claim: a script's loop is as fast as a plan: its calls travel ahead of the work.

The plan's workers draw their batches themselves; the script sends each batch to the workers that need it.
"""

from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread, alternate
from benchmarks.trainers import ours, script
from benchmarks.workload import WORKLOADS, Timing, Workload

PLAN, SCRIPT = "plan", "script"
TRAINERS: Mapping[str, Callable[[Workload], Timing]] = {PLAN: ours.train, SCRIPT: script.train}

ABOUT = """\
The workloads of the first table: with a plan, and as a script that calls `line.step(x, y)` and reads the losses at the
end. Both take turns; rates are steps per second as `min / median / max` over the rounds, the ratio is the median of
those within each round."""


def measure(rounds: int) -> BenchmarkResult:
    tables, facts = [], {}
    for workload in WORKLOADS:
        turns = {name: partial(train, workload) for name, train in TRAINERS.items()}
        timings = alternate(turns, rounds)
        rates = {name: Spread(tuple(t.steps_per_second(workload.warm) for t in runs)) for name, runs in timings.items()}
        rows = tuple(
            (name, f"{rate.low:.3g} / {rate.middle:.3g} / {rate.high:.3g}", f"{(rate / rates[PLAN]).middle:.3f}")
            for name, rate in rates.items()
        )
        tables.append(Table(str(workload), ("", "steps/s", "to plan"), rows))
        facts[str(workload)] = {name: rate.rounds for name, rate in rates.items()}
    return BenchmarkResult("From a script", ABOUT, tuple(tables), {"script": facts})
