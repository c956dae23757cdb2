"""Claim: a queue over Redis costs little more than redis-py alone, which guarantees nothing."""

from collections.abc import Callable, Mapping
from dataclasses import asdict

from benchmarks.measuring import redis_server, trips
from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.rounds import Spread
from benchmarks.measuring.trips import Load, Opener, Speed, Speeds
from benchmarks.wires.redis import BareRedisWire, open_sleeping_wire, open_wire

LOADS = (
    Load("4 KB", 4 << 10, trips=1500, stream=4000),
    Load("64 KB", 64 << 10, trips=1000, stream=2000),
    Load("1 MB", 1 << 20, trips=200, stream=300),
    Load("16 MB", 16 << 20, trips=15, stream=30),
)

BARE, OURS, ASLEEP = "bare redis-py", "stageline", "without looking"
WIRES: dict[str, Opener] = {BARE: BareRedisWire, OURS: open_wire, ASLEEP: open_sleeping_wire}

ABOUT = """\
Two processes on one machine exchange float32 tensors of one size through a Valkey server on a unix socket, which keeps
nothing on disk. Bare is redis-py: an XADD and an XREAD of the same bytes for each message and one CRC-32 of them at
each end; ours is the queue over Redis, which also sends a header with each message and retains it. The latency is half
of a round trip; a stream goes in one direction, and its figure is the time between two messages. Figures are medians
over the rounds; wires take turns, and a ratio is the median of those within each round. Without looking, each wait for
a message sleeps at once."""


def measure(rounds: int) -> BenchmarkResult:
    speeds = {load: trips.measure(WIRES, redis_server.running, load, rounds) for load in LOADS}
    tables = (
        _table("One-way latency over Redis, µs", speeds, lambda load, speed: speed.latency),
        _table("A message of a stream over Redis, µs", speeds, lambda load, speed: load.nbytes / speed.rate),
    )
    facts = [
        {"load": asdict(load), "wires": {name: list(map(asdict, runs)) for name, runs in wires.items()}}
        for load, wires in speeds.items()
    ]
    return BenchmarkResult("Queues over Redis", ABOUT, tables, {"redis": facts})


def _table(title: str, speeds: Mapping[Load, Speeds], seconds: Callable[[Load, Speed], float]) -> Table:
    rows = []
    for load, wires in speeds.items():
        spreads = {name: Spread(tuple(seconds(load, run) for run in runs)) for name, runs in wires.items()}
        figures = [f"{1e6 * spread.middle:.0f}" for spread in spreads.values()]
        rows.append((load.name, *figures, f"{(spreads[OURS] / spreads[BARE]).middle:.2f}"))
    return Table(title, ("message", *WIRES, "stageline to bare"), tuple(rows))
