"""Environment that all simulated processes share."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from simulation.clock import VirtualClock
from simulation.disk import Disks
from simulation.network import Connection, Network
from simulation.process import SimulatedProcess
from simulation.scenario import Scenario
from stageline.broker.control.messages import FromBroker
from stageline.pipeline.program import Program

if TYPE_CHECKING:
    from simulation.queues import SimulatedQueues

RUN = "simulated"
LOG_EVERY = 3
PLAN = "d" * 64


class Wrong(Exception):
    """The run is not what it must be."""


class SimulatedClient(Protocol):
    """Where the broker's answers go: a worker's channel."""

    @property
    def process(self) -> SimulatedProcess: ...

    def deliver(self, connection: Connection, message: FromBroker, frame: bytes) -> None: ...


class Server(Protocol):
    """Where the workers' messages go."""

    @property
    def process(self) -> SimulatedProcess: ...

    def receive(self, client: SimulatedClient, connection: Connection, frame: bytes) -> None: ...


@dataclass(slots=True)
class Environment:
    """`bound`: whose queues are at which endpoint. `broker` is the one that runs now, if one does."""

    scenario: Scenario
    clock: VirtualClock
    rng: random.Random
    network: Network
    disks: Disks
    fired: Counter[str]
    worked: Callable[[], None]  # called after every action
    bound: "dict[str, SimulatedQueues]" = field(default_factory=dict)
    ordered: dict[int, tuple[int, dict[int, Program]]] = field(default_factory=dict)  # incarnation, and by step
    broker: Server | None = None
    wrong: Wrong | None = None  # the first that was found

    def report(self, wrong: str) -> None:
        """Ends the simulation with what is wrong."""
        self.wrong = self.wrong or Wrong(wrong)

    def unbind(self, endpoint: str, queues: "SimulatedQueues") -> None:
        """Removes `queues` from `endpoint`, unless others have been bound there since."""
        if self.bound.get(endpoint) is queues:
            del self.bound[endpoint]

    def soon(self, mean: float) -> float:
        """A duration in seconds."""
        return self.rng.expovariate(1 / mean)
