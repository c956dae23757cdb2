"""Connections between processes: each is in order, until it is cut; what is on its way may be lost, repeated, late.

A network in doubt also loses, repeats and overtakes within a connection: the queues' ends must stand that, too.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

from simulation.clock import Clock, Deed
from simulation.process import Process


@dataclass(frozen=True, slots=True)
class Weather:
    """Probabilities of each fault for each thing sent; `slowness` is the mean delay in seconds."""

    drop: float = 0.0
    repeat: float = 0.0
    overtake: float = 0.0
    slowness: float = 0.002


@dataclass(eq=False, slots=True)
class Line:
    """A connection between two processes. `late`: what was on its way when it was cut arrives nevertheless."""

    name: bytes
    ends: tuple[Process, Process]
    broken: bool = False
    late: bool = False
    arrival: dict[Process, float] = field(default_factory=dict)  # of the newest, by receiver

    def other(self, process: Process) -> Process:
        return self.ends[process is self.ends[0]]


@dataclass(frozen=True, slots=True)
class Partition:
    """Nothing passes between `hosts` and all others before `end`."""

    hosts: frozenset[str]
    end: float

    def parts(self, one: str, other: str) -> bool:
        return (one in self.hosts) != (other in self.hosts)


class Network:
    """Carries deeds from one end of a line to the other. Every fault is drawn from `dice` and counted in `fired`."""

    def __init__(self, clock: Clock, dice: random.Random, weather: Weather, fired: Counter[str]) -> None:
        self._clock = clock
        self._dice = dice
        self._weather = weather
        self._fired = fired
        self._lines: list[Line] = []
        self._made = 0
        self._partitions: list[Partition] = []

    def connect(self, one: Process, other: Process) -> Line | None:
        """A new connection; None if nobody is there, or cannot be reached now."""
        if not other.alive or self._held_until(one, other):
            return None
        self._made += 1
        line = Line(b"line-%d" % self._made, (one, other))
        self._lines = [*(each for each in self._lines if not each.broken), line]
        return line

    def carry(self, line: Line, receiver: Process, deed: Deed, *, doubtful: bool = False) -> None:
        """Lets `receiver` do `deed` when it arrives. `doubtful`: the line itself may lose and repeat things."""
        if line.broken or (doubtful and self._happens("drop", self._weather.drop)):
            return
        for _ in range(2 if doubtful and self._happens("repeat", self._weather.repeat) else 1):
            at = self._arrives(line, receiver, doubtful)
            self._clock.after(at - self._clock.now, lambda: self._arrive(line, receiver, deed))

    def cut(self, line: Line) -> None:
        line.broken, line.late = True, self._dice.random() < 0.5
        self._fired["late words" if line.late else "lost words"] += 1

    def cut_all(self, process: Process) -> None:
        """The process is gone, and with it its connections."""
        for line in self._lines:
            if process in line.ends and not line.broken:
                self.cut(line)

    def cut_one(self) -> bool:
        """Any connection; False if there is none."""
        alive = [line for line in self._lines if not line.broken]
        if alive:
            self.cut(self._dice.choice(alive))
        return bool(alive)

    def part(self, hosts: frozenset[str], seconds: float, *, cut: bool) -> None:
        """Nothing passes between `hosts` and all others; with `cut`, what is on its way is lost, else it waits."""
        partition = Partition(hosts, self._clock.now + seconds)
        self._partitions.append(partition)
        for line in self._lines:
            if cut and partition.parts(line.ends[0].host, line.ends[1].host):
                self.cut(line)

    def _arrives(self, line: Line, receiver: Process, doubtful: bool) -> float:
        sent = max(self._clock.now, self._held_until(*line.ends))
        at = sent + self._dice.expovariate(1 / self._weather.slowness)
        before = line.arrival.get(receiver, 0.0)
        if not (doubtful and at < before and self._happens("overtake", self._weather.overtake)):
            at = max(at, before)
        line.arrival[receiver] = max(at, before)
        return at

    def _arrive(self, line: Line, receiver: Process, deed: Deed) -> None:
        if not line.broken or line.late:
            receiver.do(deed)

    def _held_until(self, one: Process, other: Process) -> float:
        """When the partition between the two ends; 0 if there is none."""
        if not self._partitions:
            return 0.0
        self._partitions = [each for each in self._partitions if each.end > self._clock.now]
        return max((each.end for each in self._partitions if each.parts(one.host, other.host)), default=0.0)

    def _happens(self, fault: str, probability: float) -> bool:
        happens = probability > 0 and self._dice.random() < probability
        self._fired[fault] += happens
        return happens
