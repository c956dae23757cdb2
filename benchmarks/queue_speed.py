"""Claim: a queue that keeps its messages is nearly as fast as the socket under it.

One-way latency (half a round trip of one message) and rate (one way, as fast as the receiver takes them).
"""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from statistics import median
from time import perf_counter

import torch

from .finding import Finding, Table
from .processes import together
from .rounds import alternate
from .wires import bare, ours
from .wires.wire import Wire


@dataclass(frozen=True, slots=True)
class Load:
    """Messages of one size: `trips` there and back for the latency, `stream` one way for the rate."""

    name: str
    nbytes: int
    trips: int
    stream: int


LOADS = (
    Load("4 KB", 4 << 10, trips=1000, stream=5000),
    Load("1 MB", 1 << 20, trips=200, stream=400),
    Load("16 MB", 16 << 20, trips=20, stream=50),
)


@dataclass(frozen=True, slots=True)
class Speed:
    """One-way latency in seconds, rate in bytes per second."""

    latency: float
    rate: float


Speeds = dict[str, list[Speed]]  # of each wire, by round

Opener = Callable[[str, int, int], Wire]  # url, which end (0 binds, 1 connects), bytes of a message

WIRES: dict[str, Opener] = {"bare pyzmq": bare.open_wire, "stageline": ours.open_wire}

ABOUT = """\
Two processes on one machine exchange float32 tensors of one size. The latency is half of a round trip; the rate is that
of a stream in one direction. Bare sends memory as it is, into memory that is already a tensor; ours retains each
message, sends a header and checksums with it, and gives each received tensor memory of its own. Figures are medians
over the rounds; wires take turns."""


def measure(rounds: int) -> Finding:
    speeds = {(scheme, load): _speeds(scheme, load, rounds) for scheme in ("ipc", "tcp") for load in LOADS}
    tables = (_latencies(speeds), _rates(speeds))
    facts = [
        {"transport": scheme, "load": asdict(load), "wires": {name: list(map(asdict, s)) for name, s in wires.items()}}
        for (scheme, load), wires in speeds.items()
    ]
    return Finding("Queues", ABOUT, tables, {"queues": facts})


def _speeds(scheme: str, load: Load, rounds: int) -> Speeds:
    return alternate({name: partial(_race, opener, scheme, load) for name, opener in WIRES.items()}, rounds)


def _race(opener: Opener, scheme: str, load: Load) -> Speed:
    with _address(scheme) as url:
        [speed, _] = together(partial(_near, opener, url, load), partial(_far, opener, url, load))
    assert speed is not None
    return speed


def _near(opener: Opener, url: str, load: Load) -> Speed:
    message = torch.zeros(load.nbytes // 4)
    with opener(url, 0, load.nbytes) as wire:
        _trips(wire, message, load.trips // 10 + 1)
        latency = _trips(wire, message, load.trips) / load.trips / 2
        rate = load.stream * load.nbytes / _stream(wire, message, load.stream)
    return Speed(latency, rate)


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


def _stream(wire: Wire, message: torch.Tensor, count: int) -> float:
    started = perf_counter()
    for _ in range(count):
        wire.send(message)
    wire.receive()
    return perf_counter() - started


@contextmanager
def _address(scheme: str) -> Iterator[str]:
    """Where two ends can meet: a socket file of their own, or a free loopback port."""
    match scheme:
        case "ipc":
            with tempfile.TemporaryDirectory() as folder:
                yield f"ipc://{os.path.join(folder, 'wire')}"
        case _:
            yield f"tcp://127.0.0.1:{_free_port()}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _latencies(speeds: Mapping[tuple[str, Load], Speeds]) -> Table:
    return _table("One-way latency, µs", speeds, lambda speed: f"{1e6 * speed:.0f}", attrgetter("latency"))


def _rates(speeds: Mapping[tuple[str, Load], Speeds]) -> Table:
    return _table("Rate, GB/s", speeds, lambda speed: f"{speed / 1e9:.2f}", attrgetter("rate"))


def _table(
    title: str,
    speeds: Mapping[tuple[str, Load], Speeds],
    shown: Callable[[float], str],
    figure: Callable[[Speed], float],
) -> Table:
    rows = tuple(
        (f"{scheme}, {load.name}", *(shown(median(map(figure, runs))) for runs in wires.values()))
        for (scheme, load), wires in speeds.items()
    )
    return Table(title, ("message", *WIRES), rows)
