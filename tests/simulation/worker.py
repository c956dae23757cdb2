"""A worker's process, and its line to the broker: what `workers.link` does, with the real reporter.

Hello until Assigned, a Report every BEAT and again until it is heard, Finished until Stop.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from broker.control import (
    CONTROL_VERSION,
    Assigned,
    Finished,
    FromBroker,
    Heard,
    Hello,
    Refused,
    Standby,
    Stop,
    ToBroker,
)
from workers.reporter import Reporter

from .loop import Farewell, Loop
from .network import Line
from .process import Process
from .surroundings import PLAN, Surroundings

BEAT = 0.1  # seconds between two reports
AGAIN = 0.25  # seconds after which an unanswered Hello is said again
IGNORED = 2.0  # seconds without confirmation of a report after which Hello is said again
JOIN = 0.5  # likewise before there is a place
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
        self._assigned: Assigned | None = None
        self._line: Line | None = None
        self._again = 0.0  # when a broken line is made anew
        self._declined = 0  # the incarnation of a place that it could not take
        self._run_known = False  # without, it does not know which snapshots are the run's
        self._known = False  # whether the broker at the other end has answered our Hello
        self._introduced = float("-inf")
        self._heard = around.clock.now
        self._outbox: deque[Farewell] = deque()
        self._finished: Finished | None = None
        self.later(around.soon(STARTING), self._join)

    def __str__(self) -> str:
        place = f"worker {self._assigned.index}, incarnation {self._assigned.incarnation}" if self._assigned else "-"
        how = "paused" if self.paused else self.loop.doing if self.loop else "has no place"
        return f"{self.name.name} (pid {self.name.pid}, {place}): {how}"

    @property
    def process(self) -> Process:
        return self

    def answer(self, line: Line, sentence: FromBroker) -> None:
        """The broker's words."""
        if line is not self._line:
            return
        match sentence:
            case Assigned() if self._assigned is None:
                self._consider(sentence)
            case Refused(_, code) | Stop(_, code) if self._assigned is None:
                self.end(code)
            case Standby(run=run) if run:
                self._run_known, self._declined = True, 0
            case _ if self.loop is None:
                return
            case Heard(number):
                self._heard = self.clock.now
                self._reporter.confirmed(number)
            case Assigned():
                self._known = True
                self._stay(sentence)
            case _:
                self._around.fired["a zombie is fenced"] += isinstance(sentence, Refused)
                self.loop.inbox.append(sentence)
                self.loop.ring()

    def _join(self) -> None:
        if self._assigned is None:
            self._say(self._hello())
            self.later(JOIN, self._join)

    def _consider(self, assigned: Assigned) -> None:
        """Takes the place, unless the snapshots to begin with are gone: then the records are old, as it says soon."""
        self._run_known = True
        if self._around.disk.is_past(self._around.scenario.schedule.placement[assigned.index], assigned.step):
            self._declined = assigned.incarnation
            self._around.fired["a place cannot be taken"] += 1
        else:
            self._begin(assigned)

    def _begin(self, assigned: Assigned) -> None:
        self._assigned = assigned
        self._around.fired["a spare takes a place"] += self.name.claim is None
        self._heard = self.clock.now
        self.loop = Loop(self, self._around, assigned, self._take_leave)
        self._reporter = Reporter(self.loop.progress, assigned.incarnation, self._around.scenario.steps)
        self._around.bound[self.name.endpoint] = self.loop.ends
        self._beat()

    def _stay(self, assigned: Assigned) -> None:
        """The broker has lost its records: goes on under a new incarnation, and says again what it knows."""
        assert self.loop is not None
        assert self._assigned is not None
        if assigned.keep and assigned.incarnation > self._assigned.incarnation:
            self._assigned = assigned
            self._around.fired["a worker goes on though the records are lost"] += 1
            self.loop.say_again()
            self._reporter = Reporter(self.loop.progress, assigned.incarnation, self._around.scenario.steps)

    def _take_leave(self, sentence: Farewell) -> None:
        """Said before the process ends; `Finished` again and again."""
        if isinstance(sentence, Finished):
            self._finished = sentence
        else:
            self._say(sentence)

    def _beat(self) -> None:
        now = self.clock.now
        assert self._assigned is not None
        assert self.loop is not None
        self._connection()
        if now - self._heard > IGNORED:
            self._known = False
        if not self._known and now - self._introduced >= AGAIN:
            self._say(self._hello())
            self._introduced = now
        self._say(msgspec.structs.replace(self._reporter.report(now), complete=self.loop.complete))
        if self._finished is not None and self._reporter.all_confirmed:
            self._say(msgspec.structs.replace(self._finished, incarnation=self._assigned.incarnation))
        self.later(BEAT, self._beat)

    def _hello(self) -> Hello:
        name, incarnation = self.name, self._assigned.incarnation if self._assigned else self._declined
        return Hello(
            CONTROL_VERSION,
            PLAN,
            name.name,
            name.host,
            name.pid,
            name.endpoint if self._assigned else "",
            name.claim,
            incarnation,
            spare=name.claim is None,
            memory=self.loop.memory() if self.loop else None,
            snapshots=self._around.disk.all() if self._run_known else None,
        )

    def _say(self, sentence: ToBroker) -> None:
        line, broker = self._connection(), self._around.broker
        if line is not None and broker is not None:
            self._around.network.carry(line, broker.process, partial(broker.hear, self, line, sentence))

    def _connection(self) -> Line | None:
        """The line to the broker, made anew if need be: the broker at its end does not know us."""
        if self._line is not None and not self._line.broken:
            return self._line
        broker = self._around.broker
        self._line = self._around.network.connect(self, broker.process) if broker else None
        self._known = False
        if self.loop is not None:
            self.loop.say_again()
        return self._line
