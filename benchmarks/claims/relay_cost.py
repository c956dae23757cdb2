"""Claim: a relay costs a run little, beside the network between."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

from benchmarks.measuring import relay, trips
from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread, alternate
from benchmarks.measuring.trips import Load, Opener, Speed, Speeds
from benchmarks.trainers import ours
from benchmarks.wires.relay import open_direct_wire, open_relayed_wire
from benchmarks.workload import WORKLOADS, Timing, Workload, demand_equal_work

LOADS = (
    Load("4 KB", 4 << 10, trips=1000, stream=3000),
    Load("1 MB", 1 << 20, trips=100, stream=200),
    Load("16 MB", 16 << 20, trips=10, stream=20),
)

DIRECT, RELAYED = "direct", "relayed"
WIRES: dict[str, Opener] = {DIRECT: open_direct_wire, RELAYED: open_relayed_wire}
TRAINERS: Mapping[str, Callable[[Workload], Timing]] = {DIRECT: ours.train_keyed, RELAYED: ours.train_relayed}

ABOUT = """\
Two processes on one machine exchange float32 tensors of one size over the queues of stageline, with CURVE: over a
connection of their own, or through a relay, a third process. The latency is half of a round trip; a stream goes in one
direction. Steps per second are those of two workers, each with a thread of torch. All processes share the machine's
cores, which a relay on another machine would not. Figures are medians over the rounds; the two take turns, and a ratio
is the median of those within each round."""


def measure(rounds: int) -> BenchmarkResult:
    speeds = {load: trips.measure(WIRES, relay.running, load, rounds) for load in LOADS}
    rates = {workload: _rates(workload, rounds) for workload in WORKLOADS}
    tables = (
        _table("One-way latency with CURVE, µs", speeds, lambda load, speed: 1e6 * speed.latency, "{:.0f}"),
        _table("A stream with CURVE, GB/s", speeds, lambda load, speed: speed.rate / 1e9, "{:.2f}"),
        Table("Steps per second", ("workload", *WIRES, "relayed to direct"), tuple(map(_steps, rates.items()))),
    )
    facts: list[dict[str, object]] = [
        {"load": asdict(load), "wires": {name: list(map(asdict, runs)) for name, runs in wires.items()}}
        for load, wires in speeds.items()
    ]
    facts += [{"workload": asdict(workload), "steps": found} for workload, found in rates.items()]
    return BenchmarkResult("A relay between two workers", ABOUT, tables, {"relay": facts})


def _table(title: str, speeds: Mapping[Load, Speeds], figure: Callable[[Load, Speed], float], form: str) -> Table:
    rows = []
    for load, wires in speeds.items():
        spreads = {name: Spread(tuple(figure(load, run) for run in runs)) for name, runs in wires.items()}
        figures = [form.format(spread.middle) for spread in spreads.values()]
        rows.append((load.name, *figures, f"{(spreads[RELAYED] / spreads[DIRECT]).middle:.2f}"))
    return Table(title, ("message", *WIRES, "relayed to direct"), tuple(rows))


def _rates(workload: Workload, rounds: int) -> dict[str, tuple[float, ...]]:
    timings = alternate({name: partial(train, workload) for name, train in TRAINERS.items()}, rounds)
    demand_equal_work((f"{name} of {workload}", run.loss) for name, runs in timings.items() for run in runs)
    return {name: tuple(run.steps_per_second(workload.warm) for run in runs) for name, runs in timings.items()}


def _steps(found: tuple[Workload, Mapping[str, tuple[float, ...]]]) -> tuple[str, ...]:
    workload, rates = found
    spreads = {name: Spread(each) for name, each in rates.items()}
    figures = [f"{spread.middle:.3g}" for spread in spreads.values()]
    return str(workload), *figures, f"{(spreads[RELAYED] / spreads[DIRECT]).middle:.2f}"
