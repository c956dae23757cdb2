"""A worker's process, and its line to the broker: what `workers.link` does, with the real correspondence."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from simulation.disk import View
from simulation.environment import PLAN, Surroundings
from simulation.loop import Farewell, Loop
from simulation.network import Line
from simulation.process import Process
from stageline.broker.control.protocol import Assigned, FromBroker, Refused, ToBroker
from stageline.workers.control.session import BEAT, JOIN, Joining, Session, TurnedAway, WorkerIdentity

STARTING = 0.1  # seconds, on the average


@dataclass(frozen=True, slots=True)
class Name:
    """How a process introduces itself; its queues will be at `endpoint`. `claim`: None for a spare."""

    name: str
    host: str
    pid: int
    claim: int | None
    endpoint: str


class Worker(Process):
    """One life of a worker."""

    def __init__(self, around: Surroundings, name: Name, ended: Callable[[int], None]) -> None:
        super().__init__(around.clock, name.host, ended)
        self.name = name
        self.loop: Loop | None = None
        self._around = around
        view = View(around.disk, around.scenario.sees(name.claim))
        self._introduction = WorkerIdentity(
            PLAN, name.name, name.host, name.pid, name.claim, {}, view, spare=name.claim is None
        )
        self._joining = Joining(self._introduction)
        self._letters: Session | None = None
        self._line: Line | None = None
        self.later(around.soon(STARTING), self._join)

    def __str__(self) -> str:
        place = f"incarnation {self._letters.incarnation}" if self._letters else "-"
        how = "paused" if self.paused else self.loop.doing if self.loop else "has no place"
        return f"{self.name.name} (pid {self.name.pid}, {place}): {how}"

    @property
    def process(self) -> Process:
        return self

    def answer(self, line: Line, sentence: FromBroker) -> None:
        """The broker's words."""
        if line is not self._line:
            return
        if self._letters is None:
            self._hear_of_place(sentence)
        else:
            self._hear(self._letters, sentence)

    def _hear_of_place(self, sentence: FromBroker) -> None:
        try:
            assigned = self._joining.hear(sentence)
        except TurnedAway as refusal:
            self.end(refusal.code)
            return
        if assigned is not None:
            self._begin(assigned)
        else:
            self._around.fired["a place cannot be taken"] += isinstance(sentence, Assigned)

    def _hear(self, letters: Session, sentence: FromBroker) -> None:
        before = letters.incarnation
        heard = letters.hear(sentence, self.clock.now)
        self._around.fired["a worker goes on though the records are lost"] += letters.incarnation > before
        if heard is not None and self.loop is not None:
            self._around.fired["a zombie is fenced"] += isinstance(heard, Refused)
            self.loop.inbox.append(heard)
            self.loop.ring()

    def _join(self) -> None:
        if self._letters is None:
            self._say(self._joining.hello())
            self.later(JOIN, self._join)

    def _begin(self, assigned: Assigned) -> None:
        around, endpoint = self._around, self.name.endpoint
        around.fired["a spare takes a place"] += self.name.claim is None
        self.loop = loop = Loop(self, around, assigned, self._take_leave)
        around.bound[endpoint] = loop.ends
        steps, now = around.scenario.steps, self.clock.now
        self._letters = Session(self._introduction, assigned, endpoint, loop.progress, steps=steps, now=now)
        self._beat(self._letters)

    def _take_leave(self, sentence: Farewell) -> None:
        """`Finished` is said with the next report, all else at once: the process may end now."""
        if self._letters is not None:
            self._letters.say(sentence)
            for last in self._letters.last_words():
                self._say(last)

    def _beat(self, letters: Session) -> None:
        self._connection()
        for sentence in letters.due(self.clock.now):
            self._say(sentence)
        self.later(BEAT, partial(self._beat, letters))

    def _say(self, sentence: ToBroker) -> None:
        line, broker = self._connection(), self._around.broker
        if line is not None and broker is not None:
            self._around.network.carry(line, broker.process, partial(broker.hear, self, line, sentence))

    def _connection(self) -> Line | None:
        """The line to the broker, made anew if need be: the broker at its end may not know us."""
        if self._line is not None and not self._line.broken:
            return self._line
        broker = self._around.broker
        self._line = self._around.network.connect(self, broker.process) if broker else None
        if self._line is not None and self._letters is not None:
            self._letters.connected()
        return self._line
