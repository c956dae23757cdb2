"""What all simulated processes share."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from simulation.clock import Clock
from simulation.disk import Disk
from simulation.endpoints import Ends
from simulation.network import Line, Network
from simulation.process import Process
from simulation.scenario import Scenario
from stageline.broker.control.protocol import FromBroker, ToBroker

RUN = "simulated"
LOG_EVERY = 3
PLAN = "d" * 64


class Wrong(Exception):
    """The run is not what it must be."""


class Listener(Protocol):
    """Who hears the broker's answers: a worker."""

    @property
    def process(self) -> Process: ...

    def answer(self, line: Line, sentence: FromBroker) -> None: ...


class BrokerProcess(Protocol):
    """Where sentences go."""

    @property
    def process(self) -> Process: ...

    def hear(self, worker: Listener, line: Line, sentence: ToBroker) -> None: ...


@dataclass(slots=True)
class Surroundings:
    """`bound`: whose queue ends are at which endpoint. `broker` is the one that lives now, if one does."""

    scenario: Scenario
    clock: Clock
    dice: random.Random
    network: Network
    disk: Disk
    fired: Counter[str]
    worked: Callable[[], None]  # called after every action
    bound: dict[str, Ends] = field(default_factory=dict)
    broker: BrokerProcess | None = None

    def unbind(self, endpoint: str, ends: Ends) -> None:
        """Nobody is at `endpoint` any more, unless somebody else has come there since."""
        if self.bound.get(endpoint) is ends:
            del self.bound[endpoint]

    def soon(self, mean: float) -> float:
        """A duration in seconds."""
        return self.dice.expovariate(1 / mean)
