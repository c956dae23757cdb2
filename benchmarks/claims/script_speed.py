"""Claim: a script's loop is as fast as a plan: its calls travel ahead of the work.

The plan's workers draw their batches themselves; the script sends each batch to the workers that need it.
"""

from dataclasses import replace
from functools import partial

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread
from benchmarks.measuring.windows import ratios, take_turns
from benchmarks.trainers import ours, script
from benchmarks.workload import WORKLOADS

LONGER = 2  # as many steps in each round as the other benchmarks time in one
SECONDS = dict(zip(WORKLOADS, (0.8, 0.8, 4.0), strict=True))  # of a window

ABOUT = """\
The workloads of the first table: with a plan, and as a script that calls `line.step(x, y)` and reads the losses at the
end. Both runs are there at once and take turns: while one goes on for 0.8 seconds, 4 for the largest, all processes
of the other are stopped. Rates are steps per second as `min / median / max` over the windows, the ratios those of each
window of the script to the two of the plan around it: median, and the quartiles."""


def measure(rounds: int) -> BenchmarkResult:
    tables, facts = [], {}
    for workload, seconds in SECONDS.items():
        longer = replace(workload, timed=workload.timed * rounds * LONGER)
        tasks = {"plan": partial(ours.train, longer), "script": partial(script.train, longer)}
        rates = {name: turns.rates for name, turns in take_turns(tasks, seconds).items()}
        found = ratios(rates["plan"], rates["script"])
        plan, called = (Spread(tuple(rate for rate in each if rate)) for each in rates.values())
        low, middle, high = found.quartiles
        row = (_rates(plan), _rates(called), f"{middle:.3f}", f"{low:.3f} to {high:.3f}", str(len(found.rounds)))
        columns = ("plan", "script", "script to plan", "quartiles", "windows")
        tables.append(Table(str(workload), columns, (row,)))
        facts[str(workload)] = {**rates, "ratios": found.rounds}
    return BenchmarkResult("From a script", ABOUT, tuple(tables), {"script": facts})


def _rates(rate: Spread) -> str:
    return f"{rate.low:.3g} / {rate.middle:.3g} / {rate.high:.3g}"
