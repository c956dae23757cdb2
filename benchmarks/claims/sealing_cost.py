"""Claim: a sealed queue over Redis costs little more than one in the clear."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

from benchmarks.measuring import redis_server, trips
from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread, alternate
from benchmarks.measuring.trips import Load, Opener, Speed, Speeds
from benchmarks.trainers import ours
from benchmarks.wires.redis import open_wire
from benchmarks.wires.sealed import open_sealed_wire
from benchmarks.workload import WORKLOADS, Timing, Workload, demand_equal_work

LOADS = (
    Load("4 KB", 4 << 10, trips=1500, stream=4000),
    Load("1 MB", 1 << 20, trips=200, stream=300),
    Load("16 MB", 16 << 20, trips=15, stream=30),
)

CLEAR, SEALED = "in the clear", "sealed"
WIRES: dict[str, Opener] = {CLEAR: open_wire, SEALED: open_sealed_wire}

ABOUT = """\
Two processes on one machine exchange float32 tensors of one size over the queues of stageline, through a Valkey server
on a unix socket, which keeps nothing on disk. Sealed is the same with AES-256-GCM at both ends, for messages and for
what the ends announce. The latency is half of a round trip; a stream goes in one direction. Steps per second are those
of two workers over such a server, each with a thread of torch. Figures are medians over the rounds; the two take turns,
and a ratio is the median of those within each round."""

TRAINERS: Mapping[str, Callable[[Workload], Timing]] = {CLEAR: ours.train_over_redis, SEALED: ours.train_sealed}


def measure(rounds: int) -> BenchmarkResult:
    speeds = {load: trips.measure(WIRES, redis_server.running, load, rounds) for load in LOADS}
    rates = {workload: _rates(workload, rounds) for workload in WORKLOADS}
    tables = (
        _table("One-way latency over Redis, µs", speeds, lambda load, speed: 1e6 * speed.latency, "{:.0f}"),
        _table("A stream over Redis, GB/s", speeds, lambda load, speed: speed.rate / 1e9, "{:.2f}"),
        Table(
            "Steps per second over Redis", ("workload", *WIRES, "sealed to clear"), tuple(map(_steps, rates.items()))
        ),
    )
    facts: list[dict[str, object]] = [
        {"load": asdict(load), "wires": {name: list(map(asdict, runs)) for name, runs in wires.items()}}
        for load, wires in speeds.items()
    ]
    facts += [{"workload": asdict(workload), "steps": found} for workload, found in rates.items()]
    return BenchmarkResult("Sealed queues over Redis", ABOUT, tables, {"sealing": facts})


def _table(title: str, speeds: Mapping[Load, Speeds], figure: Callable[[Load, Speed], float], form: str) -> Table:
    rows = []
    for load, wires in speeds.items():
        spreads = {name: Spread(tuple(figure(load, run) for run in runs)) for name, runs in wires.items()}
        figures = [form.format(spread.middle) for spread in spreads.values()]
        rows.append((load.name, *figures, f"{(spreads[SEALED] / spreads[CLEAR]).middle:.2f}"))
    return Table(title, ("message", *WIRES, "sealed to clear"), tuple(rows))


def _rates(workload: Workload, rounds: int) -> dict[str, tuple[float, ...]]:
    timings = alternate({name: partial(train, workload) for name, train in TRAINERS.items()}, rounds)
    demand_equal_work((f"{name} of {workload}", run.loss) for name, runs in timings.items() for run in runs)
    return {name: tuple(run.steps_per_second(workload.warm) for run in runs) for name, runs in timings.items()}


def _steps(found: tuple[Workload, Mapping[str, tuple[float, ...]]]) -> tuple[str, ...]:
    workload, rates = found
    spreads = {name: Spread(each) for name, each in rates.items()}
    figures = [f"{spread.middle:.3g}" for spread in spreads.values()]
    return str(workload), *figures, f"{(spreads[SEALED] / spreads[CLEAR]).middle:.2f}"
