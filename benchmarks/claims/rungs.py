"""Claim: it is known what each of stageline's parts costs a microbatch, from the bare loop to a run of processes."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread
from benchmarks.measuring.windows import Turns, take_turns
from benchmarks.trainers.rungs import RUNGS
from benchmarks.workload import MICROBATCHES, STAGES, WORKLOADS

LONGER = {WORKLOADS[0]: 8, WORKLOADS[1]: 5, WORKLOADS[2]: 6}  # times as many steps as others time, for each round
SECONDS = dict(zip(WORKLOADS, (0.5, 0.5, 3.0), strict=True))  # of a window

ABOUT = """\
The two workers of the first table, from a loop by hand to a run, each with one of stageline's parts more than the one
before. All are there at once and take turns: while one goes on for half a second, 3 seconds for the largest, all
processes of the others are stopped. Rates are medians over the windows, the ratio that of each window to the one before
it: median, and quartiles. Microseconds are those of a microbatch, forward and backward: of the wall's time, of the
compute thread of one worker (the mean of both) on a processor, of that thread ready but without a processor, and of
all other threads together on a processor. Switches are how often a compute thread is given a processor, and faults
those of pages in all processes, for a microbatch."""

COLUMNS = (
    "with",
    "steps/s",
    "to the one before",
    "quartiles",
    "wall µs",
    "compute µs",
    "ready µs",
    "others µs",
    "switches",
    "faults",
)


def measure(rounds: int) -> BenchmarkResult:
    tables, facts = [], {}
    for workload, seconds in SECONDS.items():
        longer = replace(workload, timed=workload.timed * LONGER[workload] * rounds)
        turns = take_turns({name: partial(train, longer) for name, train in RUNGS.items()}, seconds)
        tables.append(Table(str(workload), COLUMNS, tuple(_rows(turns))))
        facts[str(workload)] = {name: each.rates for name, each in turns.items()}
    return BenchmarkResult("From the bare loop to a run", ABOUT, tuple(tables), {"rungs": facts})


def _rows(turns: Mapping[str, Turns]) -> list[tuple[str, ...]]:
    rows, before = [], None
    for name, each in turns.items():
        rates = Spread(tuple(rate for rate in each.rates if rate))
        rows.append((name, f"{rates.middle:.3g}", *_compared(before, each), *_costs(each)))
        before = each
    return rows


def _compared(before: Turns | None, now: Turns) -> tuple[str, str]:
    if before is None:
        return "", ""
    pairs = zip(before.rates, now.rates, strict=True)
    low, middle, high = Spread(tuple(new / old for old, new in pairs if old and new)).quartiles
    return f"{middle:.2f}", f"{low:.2f} to {high:.2f}"


def _costs(turns: Turns) -> tuple[str, ...]:
    used, count = turns.used, turns.steps * MICROBATCHES
    compute = used.busiest(STAGES)
    ran, waited = sum(used.ran[thread] for thread in compute), sum(used.waited[thread] for thread in compute)
    others = used.ran.total() - ran
    figures = turns.seconds * 1e6, ran / 1e3 / STAGES, waited / 1e3 / STAGES, others / 1e3
    switches = sum(used.switches[thread] for thread in compute) / STAGES
    return (
        *(f"{figure / count:.0f}" for figure in figures),
        *(f"{n / count:.1f}" for n in (switches, used.faults.total())),
    )
