"""The loop of one worker: a machine decides, an executor computes, queues carry, progress is left for the reports.

poll():  Finish       the next call is asked for (`call_source.py`), or nothing yet: then this turn is over   -> machine
         Closed       the run pauses before this training step: then this turn is over
         AwaitCredit  in a stage that runs forward only: the consumer is too far behind, then it is over      -> machine
         Take         the queue gives a message, or nothing yet: then it is over                              -> machine
         Compute      the executor computes, the queue gets the result; then it is over                       -> machine
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

from msgspec import UNSET

from stageline.broker.codec.codecs import Codec
from stageline.broker.codec.message import Message
from stageline.broker.codec.tensors import coded
from stageline.broker.control.pauses import Hold
from stageline.broker.control.records import ScheduleOrder
from stageline.broker.ledger.times import WaitCause
from stageline.broker.queues.base import Inbound, Outbound, Queues
from stageline.pipeline.process.steady_clock import STEADY
from stageline.pipeline.program import Instruction, Program
from stageline.pipeline.schedule import Kind
from stageline.pipeline.tree import Tree
from stageline.workers.runs.metrics import StepMetrics

from .call_source import CallSource, Keep, LoopParts, Measured, SaveStages
from .calls import Position, RunCalls
from .executor import CarryOut, Executor
from .idle import CallWait
from .machine import AwaitCredit, Closed, Command, Compute, Finish, Machine, Take
from .progress import Progress
from .queue_counter import QueueCounter

OnStep = Callable[[int, int, float | None], None]
Put = Callable[[int, int, Tree], None]  # of a step and a microbatch, or whatever else the queue's messages are of

PATIENCE = 0.25  # seconds that one wait for a message lasts at most, before the worker handles the broker's commands


class Clock(Protocol):
    """A clock to read time from and to wait by, in seconds. `SteadyClock` is one."""

    def time(self) -> float:
        """Return the seconds since the epoch, by a clock that is not set while the process lives."""

    def monotonic(self) -> float:
        """Return the seconds of a clock that is never set back, for deadlines."""

    def sleep(self, seconds: float, /) -> None:
        """Wait for `seconds` seconds."""


class Calls(RunCalls, Protocol):
    """All calls of a run, from which each worker's calls are made."""

    def source(self, parts: LoopParts) -> CallSource:
        """Return the calls to the worker that `parts` belong to."""


class WorkerLoop:
    """The loop that runs one worker's part of a run."""

    def __init__(
        self,
        calls: Calls,
        worker: int,
        executor: Executor,
        queues: Queues,
        *,
        carry_out: CarryOut | None = None,
        run: str,
        incarnation: int,
        start: int = 0,
        clock: Clock = STEADY,
        progress: Progress | None = None,
        measured: Measured | None = None,
        keep: Keep = lambda step: None,
        save: SaveStages = lambda folder, position: None,
        drawn: Callable[[], float] = float,
    ) -> None:
        """Prepare the loop; `run` or `poll` starts it.

        Args:
            calls: Calls of the run.
            worker: Place of the worker.
            executor: Computes instructions.
            queues: Queues of the worker.
            carry_out: Replaces the executor's method, and calls it.
            run: Id of the run, written into the worker's messages.
            incarnation: Incarnation of the worker, written into its messages.
            start: Training step that is next.
            clock: Gives the time of events.
            progress: Notes all that happens; by default the loop makes it.
            measured: Takes the metrics of each training step and each evaluation, on the worker of the last stage.
            keep: Saves the state after so many steps: before a script sets other weights, and where a run ends.
            save: Carries out a script's call to save the worker's stages.
            drawn: Returns the seconds in which rows were drawn since it was last called.
        """
        program = calls.program
        self.progress = progress or Progress.of(calls, worker, start=start, now=clock.time())
        self.program = program
        self.patience = PATIENCE  # seconds that one wait for a message lasts at most
        self._attention = True
        self._on_step: OnStep = lambda stage, step, loss: None
        self._measured = measured
        self._machine = Machine(iter(()), start)
        self._executor = executor
        self._carry_out = carry_out or executor.carry_out
        self._drawn = drawn
        self._queues = queues
        self._now = clock.time
        self._inbound: Callable[[str], Inbound] = cache(lambda name: queues.inbound(program.queues[name]))
        self._outbound = OutboundQueues(queues, program, run=run, incarnation=incarnation)
        self._counter = cache(lambda: QueueCounter(queues, program.ends_of(worker), worker))
        self._received: list[Tree] = []
        parts = LoopParts(
            worker=worker,
            start=start,
            executor=executor,
            inbound=self._inbound,
            opened=self._outbound.opened,
            outbound=self._outbound.of,
            put_reply=self._outbound.put_reply,
            progress=self.progress,
            now=clock.time,
            pump=queues.pump,
            measured=measured or (lambda line: None),
            keep=keep,
            save=save,
        )
        self._calls = calls.source(parts)
        self._taken: Callable[[str], Inbound] = cache(lambda name: self._calls.around(self._inbound(name)))

    def run(self, between: Callable[[], None], on_step: OnStep) -> None:
        """Poll until the program is over. Exceptions of the two functions end the loop.

        Args:
            between: Called between two turns after `attend` was called, and before the first turn.
            on_step: Called after each update with the stage, the step and its loss.
        """
        self._on_step = on_step
        while not self.finished:
            if self._attention:
                self._attention = False
                between()
            if self.progress.counts_wanted:
                self.count_queues()
            self.poll(self.patience)
        self.progress.ended()

    def count_queues(self) -> None:
        """Count the queues of this worker for its next report."""
        self.progress.counted(self._counter().count(self._now()))

    def attend(self) -> None:
        """Have `run` call `between` before its next turn. For any thread, and for signal handlers."""
        self._attention = True

    def attend_within(self, seconds: float) -> None:
        """Have `run` call `between` before its next turn, and let no wait take longer than `seconds` from now on."""
        self.patience = seconds
        self._attention = seconds < PATIENCE or self._attention

    def begin_at(self, position: Position) -> None:
        """Continue from `position`, whose checkpoint has been restored."""
        self._calls.begin_at(position)

    def hold(self, order: Hold) -> None:
        """Begin no training step that `order` holds back, unless a newer order is known."""
        held = self.progress.held
        if held.is_new(order):
            held.learn(order, self._hold_from(order.step))

    def end_before(self, step: int) -> None:
        """Begin the training steps before `step`, though a pause holds some of them back: there the run ends."""
        if self._machine.held is not None and self._machine.held < step:
            self._hold_from(step)

    def _hold_from(self, step: int | None) -> int | None:
        stood = type(self._machine.command) is Closed
        first = self._machine.hold(step)
        if stood and type(self._machine.command) is not Closed:
            self.progress.called_to(None, self._now())
        return first

    def learn(self, orders: Sequence[ScheduleOrder], closed: int | None) -> None:
        """Note the broker's orders; steps from `closed` on wait for another one."""
        self._calls.learn(orders, closed)

    @property
    def finished(self) -> bool:
        """True if all calls are over."""
        return type(self._machine.command) is Finish and self._calls.over

    @property
    def calls(self) -> int:
        """The number of calls of the script that are done; 0 in a run that no script calls."""
        return self._calls.done

    @property
    def step(self) -> int | None:
        """The number of training steps before the current instruction; None when all calls are over.

        In a scripted run, the number before the script's next call to train.
        """
        command = self._machine.command
        return self._calls.step(None if isinstance(command, Finish) else command.instruction)

    @property
    def doing(self) -> str:
        """The present work of the loop, in words."""
        match self._machine.command:
            case Closed(instruction):
                return f"waits before step {instruction.step}: the run is paused"
            case AwaitCredit(queue, instruction):
                return f"{instruction} waits for credit in {queue}"
            case Take(queue, instruction):
                number = self.program.queues[queue].number(instruction.step, instruction.op.action.microbatch)
                return f"{instruction} waits for message {number} of {queue}"
            case Compute(instruction):
                return f"{instruction} is next"
            case Finish():
                return "finished" if self._calls.over else self._calls.doing

    def note_answered(self) -> None:
        """Note which replies have arrived at the script."""
        self._calls.note_answered()

    def lacks_room(self) -> None:
        """Note that a `put` of this loop waits for room: a worker that waits does not hang.

        Called during such a wait.
        """
        command = self._machine.command
        if isinstance(command, Compute) and command.instruction.gives:
            self.progress.lacks_room(Take(command.instruction.gives[0], command.instruction), self._now())
        else:
            self._calls.lacks_room(self._now())

    def poll(self, timeout: float) -> bool:
        """Do one turn: take the messages that the current instruction needs, and carry it out.

        Returns False if a call, a message or credit did not come, or all calls are over. `timeout` is the longest wait
        for each message, in seconds.
        """
        command = self._machine.command
        if type(command) is Finish:
            instructions = self._calls.next(timeout)
            if instructions is None:
                return False
            command = self._machine.extend(instructions)
        if type(command) is Closed:
            return self._stand(command.instruction.step, timeout)
        if type(command) is AwaitCredit:
            command = self._await_credit(command, timeout)
            if type(command) is AwaitCredit:
                return False
        while type(command) is Take:
            self.progress.waiting(command)
            inbound = self._taken(command.queue)
            message = inbound.take(timeout)
            if message is None:
                return False
            command = self._machine.arrived(command.queue, *inbound.queue.at(message.number))
            self._received.append(message.payload)
        if type(command) is Compute:
            self._compute(command.instruction)
        return True

    def _stand(self, step: int, timeout: float) -> bool:
        """Serve the queues while the run pauses before `step`; return False, since nothing is computed."""
        said = f"the end of a pause before step {step}: `stageline run resume`"
        self.progress.waiting_for_call(CallWait(said, cause=WaitCause.PAUSED), self._now())
        self.progress.held.stands()
        self._queues.pump(timeout)
        return False

    def _await_credit(self, wanted: AwaitCredit, timeout: float) -> Command:
        outbound, instruction = self._outbound.of(wanted.queue), wanted.instruction
        number = self.program.queues[wanted.queue].number(instruction.step, instruction.op.action.microbatch)
        if not outbound.has_credit(number, 0):
            self.progress.waiting(wanted)
            if not outbound.has_credit(number, timeout):
                return wanted
        if self.progress.lacking is wanted and not instruction.evaluates:  # now, or in a turn before this one
            self.progress.passed(self._now())
        return self._machine.granted()

    def _compute(self, instruction: Instruction) -> None:
        self.progress.computing(instruction, self._now())
        result = self._carry_out(instruction, self._received)
        self._received.clear()
        drawn = self._drawn()
        self._outbound.put(instruction, result)
        if instruction.evaluates:
            self.progress.evaluated(self._now())
            self._calls.evaluated(instruction.op.action.stage, result)
            if instruction.op.action.microbatch == self.program.schedule.microbatches - 1:
                self._queues.pump(0)
        else:
            self.progress.drew(drawn)
            self.progress.done(instruction, self._now())
            if instruction.op.action.kind is Kind.UPDATE:
                self._end_step(instruction.op.action.stage, instruction.step)
        self._machine.computed()

    def _end_step(self, stage: int, step: int) -> None:
        last = stage == self.program.last
        loss, norm = (self._executor.loss, self._executor.gradient_norm) if last else (None, None)
        self.progress.closed(stage, step, loss, norm)
        if last and self._measured is not None:
            self._measured(self._metrics(step))
        self.progress.passed(self._now())
        self._on_step(stage, step, loss)
        self.progress.saved(self._now())
        self._queues.pump(0)

    def _metrics(self, step: int) -> StepMetrics:
        found = self._executor
        return StepMetrics(
            step=step,
            loss=found.loss,
            gradient_norm=UNSET if found.gradient_norm is None else found.gradient_norm,
            learning_rates=found.learning_rates,
            rows=found.rows,
            time=self._now(),
        )


class OutboundQueues:
    """The queues that one worker puts into, by name. Each is opened when it is needed first.

    Attributes:
        opened: Queues that are open, by name.
        of: Returns the queue of this name.
    """

    def __init__(self, queues: Queues, program: Program, *, run: str, incarnation: int) -> None:
        """Open no queue yet.

        Args:
            queues: Opens the queues.
            program: Says which queues there are.
            run: Id of the run, written into the messages.
            incarnation: Incarnation of the worker, written into the messages.
        """
        self.opened: dict[str, Outbound] = {}
        self.of: Callable[[str], Outbound] = cache(self._open)
        self._queues = queues
        self._program = program
        self._run = run
        self._incarnation = incarnation
        self._putting: Callable[[str], Put] = cache(self._put_into)

    def put(self, instruction: Instruction, result: Tree) -> None:
        """Put the result of `instruction` into the queues that take it."""
        op = instruction.op
        for name in op.gives:
            self._putting(name)(instruction.step, op.action.microbatch, result)

    def put_reply(self, name: str, number: int, reply: Tree) -> None:
        """Put the reply to a script's call into a queue.

        Args:
            name: Name of the queue.
            number: Number of the reply in its queue.
            reply: The reply.
        """
        self._putting(name)(number, 0, reply)

    def _put_into(self, name: str) -> Put:
        """Return the function that puts into a queue. Data that all its messages share are looked up once."""
        queue, put = self._program.queues[name], self.of(name).put
        run, incarnation, count, codec = self._run, self._incarnation, queue.count, Codec[queue.codec.upper()]
        places = {microbatch: place for place, microbatch in enumerate(queue.microbatches)}

        def put_one(step: int, microbatch: int, payload: Tree) -> None:
            content = None if queue.signals else payload
            put(Message(run, name, step, incarnation, content))

        def put_of_microbatch(step: int, microbatch: int, payload: Tree) -> None:
            put(Message(run, name, step * count + places[microbatch], incarnation, payload))

        def put_coded(step: int, microbatch: int, payload: Tree) -> None:
            put_of_microbatch(step, microbatch, coded(payload, codec))

        if not queue.per.many:
            return put_one
        return put_of_microbatch if codec is Codec.LOSSLESS else put_coded

    def _open(self, name: str) -> Outbound:
        self.opened[name] = outbound = self._queues.outbound(self._program.queues[name])
        return outbound
