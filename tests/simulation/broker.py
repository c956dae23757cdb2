"""The broker's process: the real core on a store that outlives it. It may be killed between two writes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from simulation.clock import Callback, VirtualClock
from simulation.environment import PLAN, RUN, SimulatedClient
from simulation.network import Connection, Network
from simulation.process import SimulatedProcess
from stageline.broker.control.messages import Answer, Ask, ToBroker
from stageline.broker.control.protocol import decode_to_broker
from stageline.broker.control.records import StepRecord
from stageline.broker.control.store import Fact, MemoryStore
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.place_keys import shut_out
from stageline.broker.coordinator.run import RunConfig, run_of
from stageline.broker.coordinator.state import Life, Outgoing

TICK = 0.1  # seconds


CONTINUES = "a killed broker resumes the run, and its workers continue"
STARTS_OVER = "a killed broker resumes the run, and no worker is running"


class Killed(Exception):
    """The process was killed while it wrote."""


class FragileStore(MemoryStore):
    """Kills its broker at a write, before it is done or after."""

    fuse = 0  # at which write from now on; 0: at none
    before = False

    def append(self, records: Sequence[StepRecord], losses: Mapping[int, float | None]) -> None:
        self._write(partial(super().append, records, losses))

    def put(self, name: str, fact: Fact) -> None:
        self._write(partial(super().put, name, fact))

    def go_back(self, stages: Sequence[int], step: int) -> None:
        self._write(partial(super().go_back, stages, step))

    def _write(self, write: Callback) -> None:
        self.fuse = max(-1, self.fuse - 1)
        if self.fuse == 0 and self.before:
            raise Killed
        write()
        if self.fuse == 0:
            raise Killed


class SimulatedBroker(SimulatedProcess):
    """One process of the broker. `watch` is called after everything it has decided; with `resume`, the run goes on, and
    if the broker is `alone`, as a whole. `key`: of the run, if its store has none."""

    def __init__(
        self,
        clock: VirtualClock,
        network: Network,
        store: FragileStore,
        terms: RunConfig,
        watch: Callable[[list[Outgoing]], None],
        ended: Callable[[int], None],
        fired: Counter[str],
        *,
        key: bytes,
        new: bool,
        resume: bool,
        alone: bool,
    ) -> None:
        super().__init__(clock, "broker", ended)
        run = run_of(store, PLAN, RUN, key, new=new, resume=resume, alone=alone)
        self.core = Coordinator(terms, store, run, clock.now)
        self._fired = fired
        self._network = network
        self._watch = watch
        self._connections: dict[bytes, tuple[Connection, SimulatedClient]] = {}
        self._tick()

    @property
    def process(self) -> SimulatedProcess:
        return self

    def receive(self, client: SimulatedClient, connection: Connection, frame: bytes) -> None:
        self._connections[connection.name] = connection, client
        sealed = decode_to_broker(frame)
        self._decide(lambda: self.core.receive(connection.name, sealed, self.clock.now).outgoing)

    def note(self, message: ToBroker) -> None:
        """Of the supervisor, which needs no answer."""
        self._decide(lambda: self.core.handle(b"supervisor", message, self.clock.now))

    def shut_out(self, process: SimulatedProcess) -> None:
        """The key of the process's machine is revoked."""
        out = {name for name, (_, client) in self._connections.items() if client.process is process}
        self._decide(lambda: shut_out(self.core.run, out.__contains__, self.clock.now))

    def why(self) -> str:
        """Who waits for whom."""
        answers = [answer for _, answer in self.core.handle(b"client", Ask("why"), self.clock.now)]
        return "; ".join(str(answer.facts["text"]) for answer in answers if isinstance(answer, Answer))

    def _tick(self) -> None:
        self._decide(lambda: self.core.tick(self.clock.now))
        self.later(TICK, self._tick)

    def _decide(self, decide: Callable[[], list[Outgoing]]) -> None:
        listened = self.core.run.lifecycle.state is Life.RECONNECTING
        try:
            sends = decide()
        except Killed:
            self.end(-9)
            return
        if (
            listened
            and self.core.run.lifecycle.state is not Life.RECONNECTING
            and self.core.run.lifecycle.state is not Life.RECONCILING
        ):
            self._fired[CONTINUES if self.core.run.registry.members else STARTS_OVER] += 1
        self._watch(sends)
        for (recipient, message), (_, frame) in zip(sends, self.core.envelopes(sends, self.clock.now), strict=True):
            connection, client = self._connections.get(recipient, (None, None))
            if connection is not None and client is not None:
                self._network.carry(connection, client.process, partial(client.deliver, connection, message, frame))
