"""Claim: a queue that keeps its messages is nearly as fast as a bare socket, over shm, ipc and tcp."""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from statistics import median
from time import perf_counter

import torch

from benchmarks.measuring import trips
from benchmarks.measuring.finding import BenchmarkResult, Table
from benchmarks.measuring.processes import together
from benchmarks.measuring.rounds import Spread
from benchmarks.measuring.trips import Load, Opener, Speed, Speeds
from benchmarks.wires import bare, ours

LOADS = (
    Load("4 KB", 4 << 10, trips=1000, stream=5000),
    Load("1 MB", 1 << 20, trips=200, stream=400),
    Load("16 MB", 16 << 20, trips=20, stream=50),
)

BARE, OURS, ASLEEP = "bare pyzmq", "stageline", "without looking"
WIRES: dict[str, Opener] = {BARE: bare.open_wire, OURS: ours.open_wire, ASLEEP: ours.open_sleeping_wire}

ABOUT = """\
Two processes on one machine exchange float32 tensors of one size. The latency is half of a round trip; the rate is that
of a stream in one direction. Bare sends memory as it is, into memory that is already a tensor; ours retains each
message, sends a header and checksums with it, gives each received tensor memory of its own, and keeps what it frees, as
a worker does. Beside `shm`, bare pyzmq goes over ipc. Figures are medians over the rounds; wires take turns, and a
ratio is the median of those within each round. Without looking, each wait for a message sleeps at once. Copying 16 MB
from one tensor to another, in one process, has the rate of the last table."""


def measure(rounds: int) -> BenchmarkResult:
    speeds = {
        (scheme, load): trips.measure(WIRES, partial(address, scheme), load, rounds)
        for scheme in ("shm", "ipc", "tcp")
        for load in LOADS
    }
    copying = Table("Copying, GB/s", ("", "one thread"), (("16 MB", f"{_copying() / 1e9:.1f}"),))
    tables = (_latencies(speeds), _rates(speeds), copying)
    facts = [
        {"transport": scheme, "load": asdict(load), "wires": {name: list(map(asdict, s)) for name, s in wires.items()}}
        for (scheme, load), wires in speeds.items()
    ]
    return BenchmarkResult("Queues", ABOUT, tables, {"queues": facts})


@contextmanager
def address(scheme: str) -> Iterator[str]:
    """An address for two ends: a socket file of their own, or a free loopback port."""
    match scheme:
        case "shm" | "ipc":
            with tempfile.TemporaryDirectory() as folder:
                yield f"{scheme}://{os.path.join(folder, 'wire')}"
        case _:
            yield f"tcp://127.0.0.1:{_free_port()}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _copying() -> float:
    """Bytes per second."""
    (rate,) = together(_copy_again_and_again)
    return rate


def _copy_again_and_again() -> float:
    torch.set_num_threads(1)
    there = torch.randn(2**22)
    here = torch.empty_like(there)
    took = []
    for _ in range(50):
        started = perf_counter()
        here.copy_(there)
        took.append(perf_counter() - started)
    return there.nbytes / median(took)


def _latencies(speeds: Mapping[tuple[str, Load], Speeds]) -> Table:
    return _table("One-way latency, µs", speeds, lambda speed: f"{1e6 * speed:.3g}", attrgetter("latency"))


def _rates(speeds: Mapping[tuple[str, Load], Speeds]) -> Table:
    return _table("Rate, GB/s", speeds, lambda speed: f"{speed / 1e9:.2f}", attrgetter("rate"))


def _table(
    title: str,
    speeds: Mapping[tuple[str, Load], Speeds],
    shown: Callable[[float], str],
    figure: Callable[[Speed], float],
) -> Table:
    rows = []
    for (scheme, load), wires in speeds.items():
        spreads = {name: Spread(tuple(map(figure, runs))) for name, runs in wires.items()}
        ratio = (spreads[OURS] / spreads[BARE]).middle
        rows.append((f"{scheme}, {load.name}", *(shown(each.middle) for each in spreads.values()), f"{ratio:.2f}"))
    return Table(title, ("message", *WIRES, "stageline to bare"), tuple(rows))
