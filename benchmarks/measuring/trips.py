"""The speed of a wire: round trips one at a time, and a stream as fast as the receiver takes it.

near   trip, trip, trip ...   stream, until one comes back
far    sends each back        receives all, sends one back
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from benchmarks.wires.wire import Wire

from .processes import together
from .rounds import alternate


@dataclass(frozen=True, slots=True)
class Load:
    """Messages of one size: `trips` round trips for the latency, `stream` one way for the rate."""

    name: str
    nbytes: int
    trips: int
    stream: int

    @property
    def warm(self) -> int:
        """Trips before those that count."""
        return self.trips // 10 + 1


@dataclass(frozen=True, slots=True)
class Speed:
    """One-way latency in seconds, rate in bytes per second."""

    latency: float
    rate: float


Speeds = dict[str, list[Speed]]  # of each wire, by round
Opener = Callable[[str, int, int], Wire]  # url, which end (0 or 1), bytes of a message
Place = Callable[[], AbstractContextManager[str]]  # a url for both ends


def measure(wires: Mapping[str, Opener], place: Place, load: Load, rounds: int) -> Speeds:
    """Measures each wire between two processes of its own, at a url of its own; wires take turns."""
    return alternate({name: partial(_race, opener, place, load) for name, opener in wires.items()}, rounds)


def _race(opener: Opener, place: Place, load: Load) -> Speed:
    with place() as url:
        [speed, _] = together(partial(_near, opener, url, load), partial(_far, opener, url, load))
    assert speed is not None
    return speed


def _near(opener: Opener, url: str, load: Load) -> Speed:
    message = torch.zeros(load.nbytes // 4)
    with opener(url, 0, load.nbytes) as wire:
        _trips(wire, message, load.warm)
        latency = _trips(wire, message, load.trips) / load.trips / 2
        rate = load.stream * load.nbytes / _stream(wire, message, load.stream)
    return Speed(latency, rate)


def _far(opener: Opener, url: str, load: Load) -> None:
    with opener(url, 1, load.nbytes) as wire:
        for _ in range(load.warm + load.trips):
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
