"""Choice of stages, their machines and a schedule: the least simulated time of a step, within each machine's memory.

A chain of machines is built from its last stage to its first. The stage that is n-th from the end has n microbatches in
flight, and one more, as in 1F1B. Chains with the same machines behind them, and the same first layer at the same
machine, can be continued in the same ways, so only the best of those is kept.

    layers 7 to 9 at "cloud"                                 1 microbatch in flight
    layers 3 to 6 at "desk", layers 7 to 9 at "cloud"        2 at "desk"
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from stageline.pipeline.errors import ExitCode, StagelineError
from stageline.pipeline.program import Costs, check_schedule
from stageline.pipeline.schedule import make_schedule, window_for

from .hosts import Hosts, Link

_WIDER = 1.25  # by this the bound on the slowest part is raised where nothing is found within it


_State = tuple[tuple[int, ...], str, int]  # workers taken of each machine; that of the first part, and its first layer
FORWARD = 1 / 3  # of the seconds for a microbatch: a backward takes as long as two forwards
_SCHEDULES = ("1f1b", "eager-1f1b", "window")
_PRECISE = 1.01  # to which the memory that would do is found
_MOST_ROOM = 2.0**60


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Costs of layers, as measured on one machine.

    Attributes:
        names: Names of the layers.
        seconds: Seconds of each layer for the forward and backward of a microbatch.
        leaving: Bytes of the activation that each layer hands on.
        taken: `taken(begin, end, in_flight)` returns the bytes of a stage with the layers from `begin` up to `end` and
            `in_flight` microbatches in flight. More layers never take less.
    """

    names: Sequence[str]
    seconds: Sequence[float]
    leaving: Sequence[int]
    taken: Callable[[int, int, int], int]

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self.seconds)

    @property
    def until(self) -> list[float]:
        """Running sum of the seconds: entry k is the sum over the layers before layer k, the last entry over all."""
        return [0.0, *accumulate(self.seconds)]


@dataclass(frozen=True, slots=True)
class HostPart:
    """Part of a chain: the layers from `begin` up to `end`, at a machine."""

    host: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class HostChain:
    """Chain of `parts` in order of the layers.

    `slowest` is the seconds of the slowest stage or link for a microbatch; `latency` is the sum over all links, in
    seconds.
    """

    slowest: float
    latency: float
    parts: tuple[HostPart, ...]

    def __lt__(self, other: "HostChain") -> bool:
        """Return True if this chain is faster: by its slowest part, then by its latency."""
        return (self.slowest, self.latency) < (other.slowest, other.latency)


@dataclass(frozen=True, slots=True)
class ChainSearch:
    """Search for the fastest chain.

    Each machine's memory is multiplied by `room`; without `linked`, no links are needed.
    """

    layers: LayerTimes
    hosts: Hosts
    room: float = 1.0
    linked: bool = True

    def best(self, stages: int) -> HostChain | None:
        """Return the best chain of `stages` stages; None if there is none."""
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
        """Return the best chain whose slowest part takes at most `bound` seconds; None if there is none."""
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
        """Yield the chain with one more stage at its beginning, and at least `before` layers left before that."""
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
        """Yield the first layers of stages that end before layer `end`, each with its seconds for a microbatch.

        At least `before` layers are left; each stage fits the memory and takes at most `bound` seconds.
        """
        host, until = self.hosts.hosts[name], self.layers.until
        for begin in range(end - 1, before - 1, -1):
            seconds = (until[end] - until[begin]) / host.speed
            if seconds > bound or self.layers.taken(begin, end, in_flight) > host.memory * self.room:
                return
            yield begin, seconds

    def _with(self, taken: tuple[int, ...], name: str) -> tuple[int, ...]:
        return tuple(each + (host == name) for each, host in zip(taken, self.hosts.hosts, strict=True))


def carried(message: int, link: Link | None) -> tuple[float, float]:
    """Return the seconds that `message` bytes occupy a link, and the link's latency; both are 0 within a machine."""
    return (0.0, 0.0) if link is None else (message / link.bandwidth, link.latency)


class NoFit(StagelineError):
    """Error that the stages of a model find no room on the machines.

    Mend: Do what the message says of the constraint in the way: more memory, another machine or link, or smaller
    microbatches.

    Example: hosts: no memory of any size would do
    """

    error_code = "SL108"
    exit_code = ExitCode.REFUSED


@dataclass(frozen=True, slots=True)
class HostFitStage:
    """Stage at a machine: its layers, times and bytes.

    Attributes:
        stage: Number of the stage.
        host: Name of the machine.
        layers: Names of its layers.
        first_layer: Number of the first layer.
        seconds: Seconds for a microbatch at that machine.
        in_flight: Microbatches that it holds at most.
        bytes: Bytes that it takes with so many microbatches.
        memory: Bytes of a worker of that machine.
        message: Bytes of the message for the next stage.
        carrying: Seconds of that message to the next stage, latency included.
    """

    stage: int
    host: str
    layers: tuple[str, ...]
    first_layer: int
    seconds: float
    in_flight: int
    bytes: int
    memory: int
    message: int
    carrying: float


@dataclass(frozen=True, slots=True)
class ComparedWay:
    """Number of stages and schedule, compared by the seconds of a step; None if the stages have no room then."""

    stages: int
    schedule: str
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFit:
    """Best of all compared `ways`, schema fit/1.

    `window` is set if the schedule has one; `seconds` are of a simulated step.
    """

    schema: str = "fit/1"
    stages: tuple[HostFitStage, ...]
    schedule: str
    window: tuple[int, ...] | None
    microbatches: int
    seconds: float
    ways: tuple[ComparedWay, ...] = ()

    @property
    def cut(self) -> tuple[int, ...]:
        """First layer of each stage except the first stage."""
        return tuple(stage.first_layer for stage in self.stages[1:])


def fit(layers: LayerTimes, hosts: Hosts, microbatches: int) -> HostFit:
    """Return the stages, machines and schedule with the least simulated time of a step.

    Args:
        layers: Costs of the layers.
        hosts: Machines and links.
        microbatches: Microbatches of a step.

    Raises:
        NoFit: No cut and order of machines fits; the text names the constraint that stands in the way.
    """
    found, ways = [], []
    for count in range(1, _most_stages(layers, hosts) + 1):
        chain = ChainSearch(layers, hosts).best(count)
        for made in _scheduled(layers, hosts, chain, microbatches) if chain is not None else ():
            room = all(stage.bytes <= stage.memory for stage in made.stages)
            ways.append(ComparedWay(count, made.schedule, made.seconds if room else None))
            found += [made] if room else []
    if not found:
        raise NoFit(_in_the_way(layers, hosts))
    best = min(found, key=lambda each: (each.seconds, len(each.stages)))
    return replace(best, ways=tuple(ways))


def _most_stages(layers: LayerTimes, hosts: Hosts) -> int:
    return min(layers.count, sum(host.workers for host in hosts.hosts.values()))


def _scheduled(layers: LayerTimes, hosts: Hosts, chain: HostChain, microbatches: int) -> Iterator[HostFit]:
    """Yield the chain with each schedule. Only if messages take time are there more than the first schedule."""
    seconds, hops = _seconds(layers, hosts, chain), _hops(layers, hosts, chain)
    ways = [carrying + latency for carrying, latency, _ in hops]
    placement = [(stage,) for stage in range(len(seconds))]
    occupied = max((microbatches * carrying for carrying, _, _ in hops), default=0.0)  # of the busiest link
    for name in _SCHEDULES if any(ways) else _SCHEDULES[:1]:
        forward = FORWARD * max(seconds)
        window = window_for(ways, forward, max(seconds) - forward) if name == "window" else None
        schedule = make_schedule(name, placement, microbatches, window=window)
        verdict = check_schedule(schedule, _costs(seconds, ways))
        yield HostFit(
            stages=_stages(layers, hosts, chain, verdict.stage_peak),
            schedule=name,
            window=window,
            microbatches=microbatches,
            seconds=max(verdict.span, occupied),
        )


def _costs(seconds: Sequence[float], ways: Sequence[float]) -> Costs:
    forward, rest = [FORWARD * each for each in seconds], [(1 - FORWARD) * each / 2 for each in seconds]
    return Costs(tuple(forward), tuple(rest), tuple(rest), (0.0,) * len(seconds), tuple(ways))


def _stages(layers: LayerTimes, hosts: Hosts, chain: HostChain, peaks: Sequence[int]) -> tuple[HostFitStage, ...]:
    """Return the stages of the chain. `peaks` has the microbatches in flight of each stage at most."""
    seconds, hops = _seconds(layers, hosts, chain), [*_hops(layers, hosts, chain), (0.0, 0.0, 0)]
    return tuple(
        HostFitStage(
            stage=place,
            host=part.host,
            layers=tuple(layers.names[part.begin : part.end]),
            first_layer=part.begin,
            seconds=seconds[place],
            in_flight=peaks[place],
            bytes=layers.taken(part.begin, part.end, peaks[place]),
            memory=hosts.hosts[part.host].memory,
            message=hops[place][2],
            carrying=hops[place][0] + hops[place][1],
        )
        for place, part in enumerate(chain.parts)
    )


def _seconds(layers: LayerTimes, hosts: Hosts, chain: HostChain) -> list[float]:
    until = layers.until
    return [(until[part.end] - until[part.begin]) / hosts.hosts[part.host].speed for part in chain.parts]


def _hops(layers: LayerTimes, hosts: Hosts, chain: HostChain) -> list[tuple[float, float, int]]:
    """Return for each pair of neighbours the seconds that a message occupies their link, its latency, and its bytes."""
    found = []
    for part, following in zip(chain.parts, chain.parts[1:], strict=False):
        message = layers.leaving[part.end - 1]
        link = None if part.host == following.host else hosts.link(part.host, following.host)
        found.append((*carried(message, link), message))
    return found


def _in_the_way(layers: LayerTimes, hosts: Hosts) -> str:
    """Return the constraint without which there would be a placement, in words."""
    counts = range(1, _most_stages(layers, hosts) + 1)

    def possible(room: float, *, linked: bool = True) -> HostChain | None:
        found = (ChainSearch(layers, hosts, room, linked).best(count) for count in counts)
        return next((chain for chain in found if chain is not None), None)

    if possible(1.0, linked=False) is not None:
        apart = [f'"{one}" and "{other}"' for one in hosts.hosts for other in hosts.hosts if _apart(hosts, one, other)]
        return (
            f"links: the machines have room for the model, but not those that are linked: there is no link between "
            f"{', '.join(apart)}. Add [[links]] where machines reach each other, or all reach one queue server"
        )
    low, high = 1.0, 2.0
    while possible(high) is None and high < _MOST_ROOM:
        low, high = high, high * 2
    while high / low > _PRECISE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if possible(middle) is not None else (middle, high)
    chain = possible(high)
    if chain is None:
        return "hosts: no memory of any size would do"
    behind = len(chain.parts)
    sizes = [layers.taken(part.begin, part.end, behind - place) for place, part in enumerate(chain.parts)]
    most = max(range(behind), key=lambda place: sizes[place] / hosts.hosts[chain.parts[place].host].memory)
    part = chain.parts[most]
    return (
        f"memory: no cut and no order of machines fits. With {math.ceil(100 * (high - 1))} % more on each it would: "
        f"stage {most}, of layers {layers.names[part.begin]} to {layers.names[part.end - 1]}, would then take "
        f'{sizes[most]} bytes at "{part.host}", which has {hosts.hosts[part.host].memory} for each worker. Give a host '
        f"more memory or more workers, add a host, or take smaller microbatches"
    )


def _apart(hosts: Hosts, one: str, other: str) -> bool:
    return one < other and hosts.link(one, other) is None
