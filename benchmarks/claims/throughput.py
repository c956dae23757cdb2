"""Claim: messages through queues, with a broker watching, cost no more than a process group does.

Steps per second of the same work on two workers of one thread each, beside torch's own pipeline, a bare ZeroMQ loop
(the floor) and one process with the whole model.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread, alternate
from benchmarks.trainers import bare, gloo, ours, unsplit
from benchmarks.workload import MICROBATCHES, STAGES, WORKLOADS, Timing, Workload, demand_equal_work

OURS, TORCH, BARE = "stageline", "torch 1F1B, gloo", "bare ZeroMQ loop"
ALONE = "one process, 1 thread"
TWO_THREADS = "one process, 2 threads"
BESIDE = "one of two such processes"
UNSPLIT = ALONE, TWO_THREADS, BESIDE
LIMIT = STAGES * MICROBATCHES / (MICROBATCHES + STAGES - 1)  # of 1F1B to one process: its bubble, and nothing else
EAGER = "stageline, eager-1f1b"  # twice the microbatches in flight: a message on its way is not waited for

TRAINERS: Mapping[str, Callable[[Workload], Timing]] = {
    OURS: ours.train,
    EAGER: partial(ours.train, sets=("schedule.name=eager-1f1b",)),
    "stageline, ipc": partial(ours.train, sets=("queues.url=ipc://",)),
    "stageline, redis": ours.train_over_redis,
    BARE: bare.train,
    TORCH: gloo.train,
    ALONE: partial(unsplit.train, threads=1),
    TWO_THREADS: partial(unsplit.train, threads=2),
    BESIDE: unsplit.train_beside_another,
}

ABOUT = """\
Two workers with one torch thread each on one machine; transformer encoder layers (pre-norm, no dropout), mean squared
error, SGD, 8 microbatches a step, schedule 1f1b; eager-1f1b does the same work with more microbatches in flight, so
that no message is waited for. Messages go through `shm://`, as they do by default on Linux; in the row `ipc` they go
through ZeroMQ's sockets, as those of the bare loop do, and in the row `redis` through a Valkey server on a unix socket,
which keeps nothing on disk. Recovery is off: what it costs is measured by itself. Every trainer starts from the same
weights and must end with the same loss. They take turns; rates are steps per second as `min / median / max` over the
rounds, ratios are medians of those within each round. The limit is that of 1F1B, whose workers only wait for each other
at the beginning and the end of a step: 2 workers * 8 / 9 of the rate of one process with one thread, which has the
memory and the caches to itself. The last row is that of one of two such processes which train at once, each the whole
model: what it lacks to the row of one is what the two processors take from each other."""


def measure(rounds: int) -> BenchmarkResult:
    rates = {workload: _rates(workload, rounds) for workload in WORKLOADS}
    tables = tuple(_table(workload, by_trainer) for workload, by_trainer in rates.items())
    return BenchmarkResult("Steps per second", ABOUT, tables, {"throughput": [_facts(*item) for item in rates.items()]})


def _rates(workload: Workload, rounds: int) -> dict[str, Spread]:
    turns = {name: partial(train, workload) for name, train in TRAINERS.items()}
    timings = alternate(turns, rounds)
    demand_equal_work((f"{name} of {workload}", run.loss) for name, runs in timings.items() for run in runs)
    return {name: Spread(tuple(t.steps_per_second(workload.warm) for t in runs)) for name, runs in timings.items()}


def _table(workload: Workload, rates: Mapping[str, Spread]) -> Table:
    rows = tuple(
        (
            name,
            f"{rate.low:.3g} / {rate.middle:.3g} / {rate.high:.3g}",
            f"{(rate / rates[TORCH]).middle:.2f}",
            f"{(rate / rates[BARE]).middle:.2f}",
            "" if name in UNSPLIT else f"{(rate / rates[ALONE]).middle / LIMIT:.2f}",
        )
        for name, rate in rates.items()
    )
    return Table(str(workload), ("trainer", "steps/s", "vs torch", "vs bare", "of limit"), rows)


def _facts(workload: Workload, rates: Mapping[str, Spread]) -> dict[str, object]:
    return {
        "workload": asdict(workload),
        "steps_per_second": {name: rate.rounds for name, rate in rates.items()},
        "ratio_to_torch": {name: (rate / rates[TORCH]).rounds for name, rate in rates.items()},
        "ratio_to_bare": {name: (rate / rates[BARE]).rounds for name, rate in rates.items()},
        "part_of_limit": {
            name: [each / LIMIT for each in (rate / rates[ALONE]).rounds] for name, rate in rates.items()
        },
    }
