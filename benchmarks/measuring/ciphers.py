"""Queues in the clear and the same queues encrypted: the latency and the rate of messages, and steps per second."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.trainers.ours import PLAN, settings
from benchmarks.workload import MICROBATCHES, Workload

from .finding import BenchmarkResult, Table
from .paired import PairedRates, started, take_turns
from .rounds import PROGRESS, Spread
from .trips import Load, Opener, Place, Speed, Speeds, measure

LOADS = (
    Load("4 KB", 4 << 10, trips=1500, stream=4000),
    Load("1 MB", 1 << 20, trips=200, stream=300),
    Load("16 MB", 16 << 20, trips=15, stream=30),
)


WINDOWS = 8  # of each run in a round
LONG = 1.0  # seconds of a window
ENDLESS = 10**7  # steps: a run is ended once it is measured


@dataclass(frozen=True, slots=True)
class CipherCost:
    """A comparison of two wires and of two runs; of both the first is in the clear, and they have the same names.

    `sets`: settings of the plan for each of the runs, by the url of a place. `seconds`: of a window, by workload; in
    longer ones than `LONG`, microbatches are counted in place of steps.
    """

    over: str
    wires: Mapping[str, Opener]
    place: Place
    sets: Mapping[str, Callable[[str], Sequence[str]]]
    seconds: Mapping[Workload, float]

    def result(self, title: str, about: str, name: str, rounds: int) -> BenchmarkResult:
        """`name`: of the facts."""
        speeds = {load: measure(self.wires, self.place, load, rounds) for load in LOADS}
        rates = {workload: self._rates(workload, rounds * WINDOWS) for workload in self.seconds}
        tables = (
            self._table(f"One-way latency over {self.over}, µs", speeds, lambda speed: 1e6 * speed.latency, ".0f"),
            self._table(f"A stream over {self.over}, GB/s", speeds, lambda speed: speed.rate / 1e9, ".2f"),
            Table(
                f"Steps per second over {self.over}",
                (*self._columns("workload"), "quartiles", "pairs"),
                tuple((str(each), *_paired_figures(found)) for each, found in rates.items()),
            ),
        )
        facts: list[dict[str, object]] = [
            {"load": asdict(load), "wires": {name: list(map(asdict, runs)) for name, runs in wires.items()}}
            for load, wires in speeds.items()
        ]
        facts += [{"workload": asdict(workload), "steps": asdict(found)} for workload, found in rates.items()]
        return BenchmarkResult(title, about, tables, {name: facts})

    def _table(self, title: str, speeds: Mapping[Load, Speeds], figure: Callable[[Speed], float], form: str) -> Table:
        rows = []
        for load, wires in speeds.items():
            spreads = {name: Spread(tuple(map(figure, runs))) for name, runs in wires.items()}
            rows.append((load.name, *self._figures(spreads, form)))
        return Table(title, self._columns("message"), tuple(rows))

    def _rates(self, workload: Workload, windows: int) -> PairedRates:
        endless = settings(replace(workload, timed=ENDLESS))
        with self.place() as url:
            clear, encrypted = ([*endless, *sets(url)] for sets in self.sets.values())
            parts = MICROBATCHES if self.seconds[workload] > LONG else 0
            with (
                started(PLAN, clear, workload.warm, parts) as first,
                started(PLAN, encrypted, workload.warm, parts) as second,
            ):
                found = take_turns(first, second, windows, self.seconds[workload])
        PROGRESS.tell(f"{windows} windows", f"{workload}: {found}", result=found)  # a later one may fail
        return found

    def _columns(self, first: str) -> tuple[str, ...]:
        clear, encrypted = self.wires
        return first, clear, encrypted, f"{encrypted} to {clear.removeprefix('in the ')}"

    def _figures(self, spreads: Mapping[str, Spread], form: str) -> tuple[str, ...]:
        clear, encrypted = spreads.values()
        return f"{clear.middle:{form}}", f"{encrypted.middle:{form}}", f"{(encrypted / clear).middle:.2f}"


def _paired_figures(found: PairedRates) -> tuple[str, ...]:
    clear, encrypted = found.rates
    low, middle, high = found.ratios.quartiles
    ratio = f"{middle:.3f}", f"{low:.3f} to {high:.3f}", str(len(found.ratios.rounds))
    return f"{clear.middle:.3g}", f"{encrypted.middle:.3g}", *ratio
