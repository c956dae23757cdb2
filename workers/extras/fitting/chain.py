"""Finds the chain of machines, and the layers of each, whose slowest part takes least for a microbatch.

A chain is built from its last stage to its first: the stage that is so many from the end has that many microbatches in
flight, and one more, as in 1F1B. What has the same machines behind it, and begins with the same layer at the same
machine, goes on alike, so only the best of those is kept.

    layers 7 to 9 at "cloud"                                 1 microbatch in flight
    layers 3 to 6 at "desk", layers 7 to 9 at "cloud"        2 at "desk"
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .hosts import Hosts, Link

_WIDER = 1.25  # by this the bound on the slowest part is raised where nothing is found within it


_State = tuple[tuple[int, ...], str, int]  # workers taken of each machine; that of the first part, and its first layer


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """`seconds` of each layer for the forward and backward of a microbatch; `leaving`: the bytes of the activation that
    it hands on. `taken(begin, end, in_flight)`: the bytes of a stage that has the layers from `begin` up to `end`, and
    so many microbatches in flight; more layers never take less."""

    names: Sequence[str]
    seconds: Sequence[float]
    leaving: Sequence[int]
    taken: Callable[[int, int, int], int]

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.seconds)

    @property
    def until(self) -> list[float]:
        """The seconds of all layers before each one, and at the end of all."""
        return [0.0, *accumulate(self.seconds)]


@dataclass(frozen=True, slots=True)
class HostPart:
    """The layers from `begin` up to `end`, at a machine."""

    host: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class HostChain:
    """The `parts` in order. `slowest`: seconds of the slowest stage or link for a microbatch; `latency` of all
    links."""

    slowest: float
    latency: float
    parts: tuple[HostPart, ...]

    def __lt__(self, other: "HostChain") -> bool:
        return (self.slowest, self.latency) < (other.slowest, other.latency)


@dataclass(frozen=True, slots=True)
class ChainSearch:
    """`room`: by what each machine's memory is multiplied. Without `linked`, machines need no links."""

    layers: LayerTimes
    hosts: Hosts
    room: float = 1.0
    linked: bool = True

    def best(self, stages: int) -> HostChain | None:
        """The best chain of so many stages; None if there is none."""
        names = list(self.hosts.hosts)
        whole = self.layers.until[-1]
        speeds = sorted((host.speed for host in self.hosts.hosts.values() for _ in range(host.workers)), reverse=True)
        if stages > min(len(speeds), self.layers.count):
            return None
        slowest = 2 * whole / min(self.hosts.hosts[name].speed for name in names)
        bound = whole / sum(speeds[:stages])
        while bound < slowest:
            if (found := self._within(stages, bound)) is not None:
                return found
            bound *= _WIDER
        return self._within(stages, math.inf)

    def _within(self, stages: int, bound: float) -> HostChain | None:
        """The best of those whose slowest part takes at most `bound` seconds."""
        last = {state: chain for name in self.hosts.hosts for state, chain in self._last(name, stages, bound)}
        states: dict[_State, HostChain] = last
        for behind in range(1, stages):
            longer: dict[_State, HostChain] = {}
            for state, chain in states.items():
                for known, better in self._longer(state, chain, stages - behind - 1, behind + 1, bound):
                    if known not in longer or better < longer[known]:
                        longer[known] = better
            states = longer
        whole = [chain for (_, name, begin), chain in states.items() if begin == 0 and self.hosts.hosts[name].data]
        return min(whole, default=None)

    def _last(self, name: str, stages: int, bound: float) -> Iterator[tuple[_State, HostChain]]:
        if self.hosts.hosts[name].data:
            none = (0,) * len(self.hosts.hosts)
            for begin, seconds in self._parts(name, self.layers.count, stages - 1, 1, bound):
                part = HostPart(name, begin, self.layers.count)
                yield (self._with(none, name), name, begin), HostChain(seconds, 0.0, (part,))

    def _longer(
        self, state: _State, chain: HostChain, before: int, in_flight: int, bound: float
    ) -> Iterator[tuple[_State, HostChain]]:
        """The chain with one stage more at its beginning, and room for so many `before` that."""
        taken, following, end = state
        for place, (name, host) in enumerate(self.hosts.hosts.items()):
            link = None if name == following else self.hosts.link(name, following)
            if taken[place] == host.workers or (link is None and name != following and self.linked):
                continue
            carrying, latency = carried(self.layers.leaving[end - 1], link)
            if carrying > bound:
                continue
            for begin, seconds in self._parts(name, end, before, in_flight, bound):
                slowest = max(chain.slowest, carrying, seconds)
                longer = HostChain(slowest, chain.latency + latency, (HostPart(name, begin, end), *chain.parts))
                yield (self._with(taken, name), name, begin), longer

    def _parts(self, name: str, end: int, before: int, in_flight: int, bound: float) -> Iterator[tuple[int, float]]:
        """The layers with which a stage that ends before layer `end` can begin, and its seconds for a microbatch."""
        host, until = self.hosts.hosts[name], self.layers.until
        for begin in range(end - 1, before - 1, -1):
            seconds = (until[end] - until[begin]) / host.speed
            if seconds > bound or self.layers.taken(begin, end, in_flight) > host.memory * self.room:
                return
            yield begin, seconds

    def _with(self, taken: tuple[int, ...], name: str) -> tuple[int, ...]:
        return tuple(each + (host == name) for each, host in zip(taken, self.hosts.hosts, strict=True))


def carried(message: int, link: Link | None) -> tuple[float, float]:
    """The seconds that a message of so many bytes occupies a link, and those of its way; none within a machine."""
    return (0.0, 0.0) if link is None else (message / link.bandwidth, link.latency)
