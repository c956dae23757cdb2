"""Connections between processes: each is in order, until it is cut; what is on its way may be lost, repeated, late.

A network in doubt also loses, repeats and overtakes within a connection: the queues' ends must stand that, too.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

from simulation.clock import Callback, VirtualClock
from simulation.process import SimulatedProcess


@dataclass(frozen=True, slots=True)
class Weather:
    """Probabilities of each fault for each thing sent; `slowness` is the mean delay in seconds."""

    drop: float = 0.0
    repeat: float = 0.0
    overtake: float = 0.0
    slowness: float = 0.002


@dataclass(eq=False, slots=True)
class Connection:
    """A connection between two processes. `late`: what was on its way when it was cut arrives nevertheless."""

    name: bytes
    ends: tuple[SimulatedProcess, SimulatedProcess]
    broken: bool = False
    late: bool = False
    arrival: dict[SimulatedProcess, float] = field(default_factory=dict)  # of the newest, by receiver

    def other(self, process: SimulatedProcess) -> SimulatedProcess:
        return self.ends[process is self.ends[0]]


@dataclass(frozen=True, slots=True)
class Partition:
    """Nothing passes between `hosts` and all others before `end`."""

    hosts: frozenset[str]
    end: float

    def parts(self, one: str, other: str) -> bool:
        return (one in self.hosts) != (other in self.hosts)


class Network:
    """Carries callbacks to the other end of a connection. Faults are drawn from `rng` and counted in `fired`."""

    def __init__(self, clock: VirtualClock, rng: random.Random, weather: Weather, fired: Counter[str]) -> None:
        self._clock = clock
        self._rng = rng
        self._weather = weather
        self._fired = fired
        self._connections: list[Connection] = []
        self._made = 0
        self._partitions: list[Partition] = []

    def connect(self, one: SimulatedProcess, other: SimulatedProcess) -> Connection | None:
        """A new connection; None if the process is gone, or cannot be reached now."""
        if not other.alive or self._held_until(one, other):
            return None
        self._made += 1
        connection = Connection(b"connection-%d" % self._made, (one, other))
        self._connections = [*(each for each in self._connections if not each.broken), connection]
        return connection

    def carry(
        self, connection: Connection, receiver: SimulatedProcess, callback: Callback, *, doubtful: bool = False
    ) -> None:
        """Lets `receiver` do `callback` when it arrives. `doubtful`: the connection may lose and repeat things."""
        if connection.broken or (doubtful and self._happens("drop", self._weather.drop)):
            return
        for _ in range(2 if doubtful and self._happens("repeat", self._weather.repeat) else 1):
            at = self._arrives(connection, receiver, doubtful)
            self._clock.after(at - self._clock.now, lambda: self._arrive(connection, receiver, callback))

    def cut(self, connection: Connection) -> None:
        connection.broken, connection.late = True, self._rng.random() < 0.5
        self._fired["late messages" if connection.late else "lost messages"] += 1

    def cut_all(self, process: SimulatedProcess) -> None:
        """The process is gone, and with it its connections."""
        for connection in self._connections:
            if process in connection.ends and not connection.broken:
                self.cut(connection)

    def cut_one(self) -> bool:
        """Any connection; False if there is none."""
        alive = [connection for connection in self._connections if not connection.broken]
        if alive:
            self.cut(self._rng.choice(alive))
        return bool(alive)

    def part(self, hosts: frozenset[str], seconds: float, *, cut: bool) -> None:
        """Nothing passes between `hosts` and all others; with `cut`, what is on its way is lost, else it waits."""
        partition = Partition(hosts, self._clock.now + seconds)
        self._partitions.append(partition)
        for connection in self._connections:
            if cut and partition.parts(connection.ends[0].host, connection.ends[1].host):
                self.cut(connection)

    def _arrives(self, connection: Connection, receiver: SimulatedProcess, doubtful: bool) -> float:
        sent = max(self._clock.now, self._held_until(*connection.ends))
        at = sent + self._rng.expovariate(1 / self._weather.slowness)
        before = connection.arrival.get(receiver, 0.0)
        if not (doubtful and at < before and self._happens("overtake", self._weather.overtake)):
            at = max(at, before)
        connection.arrival[receiver] = max(at, before)
        return at

    def _arrive(self, connection: Connection, receiver: SimulatedProcess, callback: Callback) -> None:
        if not connection.broken or connection.late:
            receiver.do(callback)

    def _held_until(self, one: SimulatedProcess, other: SimulatedProcess) -> float:
        """When the partition between the two ends; 0 if there is none."""
        if not self._partitions:
            return 0.0
        self._partitions = [each for each in self._partitions if each.end > self._clock.now]
        return max((each.end for each in self._partitions if each.parts(one.host, other.host)), default=0.0)

    def _happens(self, fault: str, probability: float) -> bool:
        happens = probability > 0 and self._rng.random() < probability
        self._fired[fault] += happens
        return happens
