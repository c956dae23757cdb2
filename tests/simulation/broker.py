"""The broker's process: the real core on a store that outlives it. It may be killed between two writes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from simulation.clock import Clock, Deed
from simulation.environment import PLAN, RUN, Listener
from simulation.network import Line, Network
from simulation.process import Process
from stageline.broker.control.protocol import Answer, Ask, StepRecord, ToBroker
from stageline.broker.coordinator.assignments import Outgoing
from stageline.broker.coordinator.coordinator import Coordinator
from stageline.broker.coordinator.run import RunConfig, run_of
from stageline.broker.coordinator.run_state import RunState
from stageline.broker.stores.base import Fact
from stageline.broker.stores.memory import MemoryStore

TICK = 0.1  # seconds


GO_ON = "a killed broker resumes the run, and its workers go on"
BEGIN_ANEW = "a killed broker resumes the run, and nobody is at work"


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

    def _write(self, write: Deed) -> None:
        self.fuse = max(-1, self.fuse - 1)
        if self.fuse == 0 and self.before:
            raise Killed
        write()
        if self.fuse == 0:
            raise Killed


class Broker(Process):
    """One life of the broker. `watch` is called after everything it has decided; with `resume`, the run goes on, and
    if the broker is `alone`, as a whole."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        store: FragileStore,
        terms: RunConfig,
        watch: Callable[[list[Outgoing]], None],
        ended: Callable[[int], None],
        fired: Counter[str],
        *,
        resume: bool,
        alone: bool,
    ) -> None:
        super().__init__(clock, "broker", ended)
        self.core = Coordinator(terms, store, run_of(store, PLAN, RUN, resume=resume, alone=alone), clock.now)
        self._fired = fired
        self._network = network
        self._watch = watch
        self._lines: dict[bytes, tuple[Line, Listener]] = {}
        self._tick()

    @property
    def process(self) -> Process:
        return self

    def hear(self, worker: Listener, line: Line, sentence: ToBroker) -> None:
        self._lines[line.name] = line, worker
        self._decide(lambda: self.core.handle(line.name, sentence, self.clock.now))

    def note(self, sentence: ToBroker) -> None:
        """Of somebody who needs no answer."""
        self._decide(lambda: self.core.handle(b"supervisor", sentence, self.clock.now))

    def why(self) -> str:
        """Who waits for whom."""
        answers = [said for _, said in self.core.handle(b"anybody", Ask("why"), self.clock.now)]
        return "; ".join(str(answer.facts["text"]) for answer in answers if isinstance(answer, Answer))

    def _tick(self) -> None:
        self._decide(lambda: self.core.tick(self.clock.now))
        self.later(TICK, self._tick)

    def _decide(self, decide: Callable[[], list[Outgoing]]) -> None:
        listened = self.core.state is RunState.RECONNECTING
        try:
            sends = decide()
        except Killed:
            self.end(-9)
            return
        if listened and self.core.state is not RunState.RECONNECTING and self.core.state is not RunState.RECONCILING:
            self._fired[GO_ON if self.core.registry.members else BEGIN_ANEW] += 1
        self._watch(sends)
        for recipient, sentence in sends:
            line, worker = self._lines.get(recipient, (None, None))
            if line is not None and worker is not None:
                self._network.carry(line, worker.process, partial(worker.answer, line, sentence))
