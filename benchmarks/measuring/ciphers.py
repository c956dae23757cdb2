"""Queues in the clear and the same queues encrypted: the latency and the rate of messages, and steps per second."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

from benchmarks.workload import Timing, Workload, demand_equal_work

from .finding import BenchmarkResult, Table
from .rounds import Spread, alternate
from .trips import Load, Opener, Place, Speed, Speeds, measure

LOADS = (
    Load("4 KB", 4 << 10, trips=1500, stream=4000),
    Load("1 MB", 1 << 20, trips=200, stream=300),
    Load("16 MB", 16 << 20, trips=15, stream=30),
)


@dataclass(frozen=True, slots=True)
class CipherCost:
    """A comparison of two wires and two trainers; of both the first is in the clear, and they have the same names."""

    over: str
    wires: Mapping[str, Opener]
    place: Place
    trainers: Mapping[str, Callable[[Workload], Timing]]
    workloads: tuple[Workload, ...]

    def result(self, title: str, about: str, name: str, rounds: int) -> BenchmarkResult:
        """`name`: of the facts."""
        speeds = {load: measure(self.wires, self.place, load, rounds) for load in LOADS}
        rates = {workload: self._rates(workload, rounds) for workload in self.workloads}
        tables = (
            self._table(f"One-way latency over {self.over}, µs", speeds, lambda speed: 1e6 * speed.latency, ".0f"),
            self._table(f"A stream over {self.over}, GB/s", speeds, lambda speed: speed.rate / 1e9, ".2f"),
            Table(
                f"Steps per second over {self.over}",
                self._columns("workload"),
                tuple((str(each), *self._figures(rate, ".3g")) for each, rate in rates.items()),
            ),
        )
        facts: list[dict[str, object]] = [
            {"load": asdict(load), "wires": {name: list(map(asdict, runs)) for name, runs in wires.items()}}
            for load, wires in speeds.items()
        ]
        facts += [
            {"workload": asdict(workload), "steps": {name: rate.rounds for name, rate in found.items()}}
            for workload, found in rates.items()
        ]
        return BenchmarkResult(title, about, tables, {name: facts})

    def _table(self, title: str, speeds: Mapping[Load, Speeds], figure: Callable[[Speed], float], form: str) -> Table:
        rows = []
        for load, wires in speeds.items():
            spreads = {name: Spread(tuple(map(figure, runs))) for name, runs in wires.items()}
            rows.append((load.name, *self._figures(spreads, form)))
        return Table(title, self._columns("message"), tuple(rows))

    def _rates(self, workload: Workload, rounds: int) -> dict[str, Spread]:
        timings = alternate({name: partial(train, workload) for name, train in self.trainers.items()}, rounds)
        demand_equal_work((f"{name} of {workload}", run.loss) for name, runs in timings.items() for run in runs)
        return {
            name: Spread(tuple(run.steps_per_second(workload.warm) for run in runs)) for name, runs in timings.items()
        }

    def _columns(self, first: str) -> tuple[str, ...]:
        clear, encrypted = self.wires
        return first, clear, encrypted, f"{encrypted} to {clear.removeprefix('in the ')}"

    def _figures(self, spreads: Mapping[str, Spread], form: str) -> tuple[str, ...]:
        clear, encrypted = spreads.values()
        return f"{clear.middle:{form}}", f"{encrypted.middle:{form}}", f"{(encrypted / clear).middle:.2f}"
