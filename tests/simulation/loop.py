"""A worker's compute loop: what `workers.worker` and `workers.process` do, with the real machine and progress.

Between two actions it listens to what the broker has said, and serves its queues; while it computes it does neither.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

from simulation.chain import Executor, digest, named
from simulation.disk import Snapshot, Torn, Writer
from simulation.endpoints import Ends
from simulation.environment import LOG_EVERY, RUN, Surroundings, Wrong
from simulation.process import Process
from stageline.broker.codec.message import Message
from stageline.broker.control.protocol import (
    Assigned,
    Failed,
    Finished,
    FromBroker,
    Goodbye,
    Peers,
    Refused,
    Stop,
    Trim,
)
from stageline.broker.errors import BrokerError
from stageline.broker.queues.base import QueueKey
from stageline.pipeline.numbering import message_number
from stageline.pipeline.schedule import Kind
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.machine import Compute, Finish, Instruction, Machine, Route, Take, program
from stageline.workers.runtime.progress import Progress

ACTION = 0.02  # seconds that an action takes on the average
LOADING = 0.1  # likewise a snapshot

Farewell = Failed | Finished | Goodbye


class Left(Exception):
    """The worker leaves with exit code `code`; `told`: by the broker."""

    def __init__(self, reason: str, code: int, *, told: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.told = told


class Loop:
    """Computes for `process`, which has been `assigned` its place. `say` hands over what the broker must hear."""

    def __init__(
        self, process: Process, around: Surroundings, assigned: Assigned, say: Callable[[Farewell], None]
    ) -> None:
        schedule = around.scenario.schedule
        self.inbox: deque[FromBroker] = deque()
        self.progress = Progress(since=around.clock.now)
        self._loss: float | None = None  # of the last step
        self.hang = 0.0  # seconds by which the next action takes longer
        self._process = process
        self._around = around
        self._assigned = assigned
        self._say = say
        self._schedule = schedule
        self._route = Route(schedule.stages, schedule.first_trainable)
        self._mine = schedule.placement[assigned.index]
        self._executor = Executor(schedule, assigned.index)
        self._writer = Writer(process, around.disk, around.dice, around.scenario.disk, self._durable)
        self.progress.begin(self._mine, assigned.step, schedule.stages - 1)
        self._received: list[Tree] = []
        self._joined = self._told = False
        self._busy = True  # loading, computing, or waiting for the disk
        self._alarm = float("inf")
        self.ends = self._open()
        steps = range(assigned.step, around.scenario.steps)
        instructions = program(schedule, self._route, assigned.index, steps)
        self._machine = Machine(instructions, schedule.microbatches)
        self._command = self._machine.begin()
        process.later(around.soon(LOADING), partial(self._safely, self._load))

    @property
    def doing(self) -> str:
        """What the loop is at, in words."""
        match self._command:
            case _ if not self._joined:
                return "waits for company"
            case Take(key, number, instruction):
                return f"{instruction} waits for message {number} of {key}"
            case Compute(instruction):
                return f"computes {instruction}" if self._busy else f"{instruction} is next"
            case Finish():
                return "finished"

    def ring(self) -> None:
        """Something has come: looks at it now, if it does not compute."""
        if not self._busy:
            self._safely(self._turn)

    def _safely(self, deed: Callable[[], None]) -> None:
        try:
            deed()
        except (BrokerError, Torn) as error:
            self._say(Failed(self._assigned.incarnation, str(error), 1))
            self._process.end(1)
        except Left as left:
            if left.told and left.code:
                self._say(Goodbye(self._assigned.incarnation, str(left)))
            self._process.end(left.code)

    def _open(self) -> Ends:
        queues, producer = self._route.queues(), self._route.producer
        takes = [key for key in queues if key.stage in self._mine]
        gives = [key for key in queues if producer(key) in self._mine]
        ends = Ends(
            self._process,
            self._around.network,
            self._around.bound,
            run=RUN,
            incarnation=self._assigned.incarnation,
            microbatches=self._schedule.microbatches,
            window=self._around.scenario.window,
            local=set(takes) & set(gives),
        )
        ends.open(takes, gives)
        ends.ring = self.ring
        return ends

    def _load(self) -> None:
        if self._assigned.step:
            for index, stage in self._executor.stages.items():
                snapshot = self._around.disk.load(index, self._assigned.step)
                stage.restore(snapshot.state)
                self.progress.restored(dict(snapshot.losses))
        self.ends.trim(self._assigned.step)
        self.ends.rewind(self._assigned.step)
        self._busy = False
        self._turn()

    def _turn(self) -> None:
        self.ends.serve()
        self._listen()
        while self._joined and not self._busy and self._go_on():
            self._listen()
        if not self._busy:
            self._set_alarm()

    def _go_on(self) -> bool:
        """Does what comes next; False if there is nothing to do now."""
        match self._command:
            case Take() as take:
                return self._take(take)
            case Compute(instruction):
                self._begin(instruction)
                return True
            case Finish():
                return self._finish()

    def _take(self, take: Take) -> bool:
        self.progress.waiting(take)
        message = self.ends.take(take.key)
        if message is None:
            self._command = self._machine.timed_out()
            return False
        self._received.append(message.payload)
        self._command = self._machine.arrived(take.key, message.step, message.microbatch)
        return True

    def _begin(self, instruction: Instruction) -> None:
        self.progress.computing(instruction, self._around.clock.now)
        self._busy = True
        seconds, self.hang = self._around.soon(ACTION) + self.hang, 0.0
        self._process.later(seconds, partial(self._safely, partial(self._end, instruction)))

    def _end(self, instruction: Instruction) -> None:
        now = self._around.clock.now
        result = self._executor.carry_out(instruction, self._received)
        self._received.clear()
        if instruction.gives is not None:
            self.ends.put(instruction.gives, self._message(instruction, instruction.gives, result), now)
        self.progress.done(instruction, now)
        self._around.worked()
        if instruction.action.kind is Kind.UPDATE:
            self._close(instruction)
        else:
            self._next()

    def _next(self) -> None:
        self._busy = False
        self._command = self._machine.computed()
        self._turn()

    def _message(self, instruction: Instruction, key: QueueKey, payload: str) -> Message:
        step, microbatch = instruction.step, instruction.action.microbatch
        number = message_number(step, microbatch, self._schedule.microbatches)
        return Message(RUN, key.flow, step, microbatch, key.stage, self._assigned.incarnation, number, payload)

    def _close(self, instruction: Instruction) -> None:
        stage, step = instruction.action.stage, instruction.step
        last = stage == self._schedule.stages - 1
        self.progress.closed(stage, step, self._executor.loss if last else None)
        if last:
            self._loss = self._executor.loss
            if step % LOG_EVERY == 0:
                self.progress.losses[step] = self._loss
        self._check_bounds(stage)
        self._keep(stage, step + 1)

    def _keep(self, stage: int, step: int) -> None:
        """Takes a snapshot if one is due, as soon as there is room for it."""
        scenario = self._around.scenario
        if step % scenario.every and step != scenario.steps:
            self._next()
        elif not self._writer.room(stage):
            self.progress.waits = True
            self._process.later(0.05, partial(self._safely, partial(self._keep, stage, step)))
        else:
            losses = self._losses(step - 1) if stage == self._schedule.stages - 1 else ()
            self._writer.keep(Snapshot(stage, step, self._executor.stages[stage].snapshot(), losses))
            self._next()

    def _durable(self, stage: int, step: int) -> None:
        self.progress.durable(stage, step)
        self.ring()

    def _losses(self, step: int) -> tuple[tuple[int, float], ...]:
        """Those that a run keeps, down to that of `step`, which may be its last."""
        kept = {each: loss for each, loss in self.progress.losses.items() if each % LOG_EVERY == 0}
        return tuple(sorted((kept | {step: self._loss}).items()))

    def _finish(self) -> bool:
        self.progress.waits = self.progress.over = True
        if self._writer.idle and not self._told:
            self._told = True
            stages = self._executor.stages
            self._say(Finished(self._assigned.incarnation, named({i: digest(stage) for i, stage in stages.items()})))
        return False

    def _listen(self) -> None:
        while self.inbox:
            match self.inbox.popleft():
                case Peers(workers):
                    self._connect(workers)
                case Trim(step):
                    self._trim(step)
                case Stop(reason, code) | Refused(reason, code):
                    raise Left(reason, code, told=True)
                case _:
                    continue

    def _connect(self, workers: dict[int, tuple[int, str]]) -> None:
        owner, producer = self._schedule.owner, self._route.producer
        self.ends.connect(
            {
                key: workers[owner(producer(key))][1]
                for key in self._route.queues()
                if key.stage in self._mine and producer(key) not in self._mine
            }
        )
        self._joined = True

    def _trim(self, step: int) -> None:
        if step <= self.progress.complete:  # a broker with old records has spoken
            return
        if step > min(self.progress.finished.values()):
            raise Wrong(f"told of checkpoint {step}, having done {self.progress.finished} steps, by stage")
        before, self.progress.complete = self.progress.complete, step
        self.ends.trim(step)
        for stage in self._mine:
            self._around.disk.forget(stage, before)

    def _check_bounds(self, stage: int) -> None:
        """A producer keeps its lead over the checkpoint it was told of, and without flush what is in flight."""
        in_flight = self._schedule.stages - 1 if self._schedule.mode == "async" else 0
        bound = (self.progress.finished[stage] - self.progress.complete) * self._schedule.microbatches + in_flight
        for key, retained in self.ends.retained().items():
            if self._route.producer(key) == stage and retained > bound:
                raise Wrong(f"{key} retains {retained} messages, and {bound} may still be wanted")

    def _set_alarm(self) -> None:
        now = self._around.clock.now
        due = self.ends.due(now)
        if self._alarm <= now or due < self._alarm:
            self._alarm = due
            if due < float("inf"):
                self._process.later(due - now, self.ring)
