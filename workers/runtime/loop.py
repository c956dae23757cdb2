"""One worker's loop: a machine decides, an executor computes, queues carry, and progress is left for the reports.

poll():  AwaitOrder    before a step, in a run that chooses its schedule: until it is known by which it goes -> machine
         AwaitCredit   in a stage that runs forward only: the consumer is too far behind, then this turn is over
                                                                                                       -> machine
         Take     the queue gives a message, or nothing yet: then this turn is over   -> machine
         Compute  the executor computes, the queue gets the result; then it is over   -> machine
                  (after an evaluation, of a run that may end early: the verdict, from its figures or from the queue)
         Finish   in a scripted run: the reply to the call is put; then the script's next call is taken
"""

import time
from collections.abc import Callable
from functools import cache
from typing import Protocol

from msgspec import UNSET

from stageline.broker.codec.message import Message
from stageline.broker.control.records import EvaluationRecord
from stageline.broker.queues.base import Inbound, Queues
from stageline.pipeline.evaluation import Criterion, Standing
from stageline.pipeline.program import Instruction, Per
from stageline.pipeline.schedule import Kind
from stageline.pipeline.tree import Tree
from stageline.workers.runs.metrics import MetricsLine, StepMetrics, evaluation_line

from .call_sequence import CallSequence, Keep, SaveStages
from .calls import CallKind, Position
from .executor import CarryOut, Executor
from .machine import AwaitCredit, AwaitOrder, Command, Compute, Finish, Machine, Take
from .orders import LONGEST, OrderMissing, StepOrders
from .outbound_queues import OutboundQueues
from .plan_calls import PlanCalls
from .progress import Progress

OnStep = Callable[[int, int, float | None], None]
Measured = Callable[[MetricsLine], object]


PATIENCE = 0.25  # seconds that one wait for a message lasts at most, before the worker handles the broker's commands


class Clock(Protocol):
    """What time is read from, and waited by, in seconds; the standard module `time` is one."""

    def time(self) -> float:
        """Since the epoch: what is comparable between machines, about."""

    def monotonic(self) -> float:
        """Never set back: what deadlines are made of."""

    def sleep(self, seconds: float, /) -> None:
        """Waits."""


class WorkerLoop:
    """Runs what a worker does in a run, from step `start` on. `run` and `incarnation` are written into its messages.

    Args:
        calls: The run's program over its steps.
        worker: The worker's place.
        executor: Computes.
        queues: The worker's.
        carry_out: Replaces the executor's method, and calls it.
        run: Written into the worker's messages, as `incarnation` is.
        incarnation: The worker's.
        start: The step that is next.
        orders: Of a run that chooses its schedule.
        clock: Gives the time of events.
        progress: Is told of all that happens; by default the loop makes it.
        measured: Takes the metrics of each training step and each evaluation, on the worker of the last stage.
        keep: Saves the state after so many steps: before a script sets other weights, and where a run ends early.
        save: Carries out a script's call to save the worker's stages.
    """

    def __init__(
        self,
        calls: PlanCalls,
        worker: int,
        executor: Executor,
        queues: Queues,
        *,
        carry_out: CarryOut | None = None,
        run: str,
        incarnation: int,
        start: int = 0,
        orders: StepOrders | None = None,
        clock: Clock = time,
        progress: Progress | None = None,
        measured: Measured | None = None,
        keep: Keep | None = None,
        save: SaveStages | None = None,
    ) -> None:
        program = calls.program
        self.progress = progress or Progress.of(calls, worker, start=start, orders=orders, now=clock.time())
        self.program = program
        self._plan_calls = calls
        self._attention = True
        self._on_step: OnStep = lambda stage, step, loss: None
        self._measured = measured
        self.orders = orders
        self._machine = Machine(calls.instructions(worker, start, orders))
        position = Position(start)
        self._script = CallSequence(program, worker, executor, position, keep, save) if program.scripted else None
        self._executor = executor
        self._carry_out = carry_out or executor.carry_out
        self._queues = queues
        self._now = clock.time
        self._inbound: Callable[[str], Inbound] = cache(lambda name: queues.inbound(program.queues[name]))
        self._outbound = OutboundQueues(queues, program, run=run, incarnation=incarnation)
        self._evaluation = [queue.name for queue in program.outbound(worker) if queue.per is Per.EVALUATED]
        self._keep = keep or (lambda step: None)
        self._standing = Standing(calls.criterion or Criterion())
        self._judged = 0  # rounds of evaluation that the standing is of
        self._received: list[Tree] = []

    def run(self, between: Callable[[], None], on_step: OnStep) -> None:
        """Polls until the program is over. `between` is called between two turns if there is something to attend to,
        `on_step` after each update with the stage, the step and its loss; what they raise ends the loop."""
        self._on_step = on_step
        while not self.finished:
            if self._attention:
                self._attention = False
                between()
            if self.progress.depths_wanted:
                self.progress.counted(self._outbound.depths())
            self.poll(PATIENCE)
        self.progress.ended()

    def attend(self) -> None:
        """Has `run` call `between` before its next turn. For any thread, and for signal handlers."""
        self._attention = True

    def begin_at(self, position: Position) -> None:
        """A scripted run goes on from there: its checkpoint has been restored. Another one knows where it is."""
        if self._script is not None:
            self._script.begin_at(position)
            self.progress.begins_at(position, {queue.per: position.of(queue.per) for queue in self._script.replies})

    @property
    def finished(self) -> bool:
        """Whether the program is over."""
        return type(self._machine.command) is Finish and (self._script is None or self._script.over)

    @property
    def calls(self) -> int:
        """How many calls of a script are done."""
        return 0 if self._script is None else self._script.position.calls

    @property
    def step(self) -> int | None:
        """How many training steps come before the current instruction, or, in a scripted run, before the script's next
        call to train; None when the program is over."""
        command = self._machine.command
        if self._script is not None:
            return None if self._script.over else self._script.position.step
        return None if isinstance(command, Finish) else self._plan_calls.step_at(command.instruction)

    @property
    def doing(self) -> str:
        """What the loop does now, in words."""
        match self._machine.command:
            case AwaitCredit(queue, instruction):
                return f"{instruction} waits for credit in {queue}"
            case AwaitOrder(instruction):
                return f"step {instruction.step} waits for its order"
            case Take(queue, instruction):
                number = self.program.queues[queue].number(instruction.step, instruction.action.microbatch)
                return f"{instruction} waits for message {number} of {queue}"
            case Compute(instruction):
                return f"{instruction} is next"
            case Finish() if self._script is not None and not self._script.over:
                return f"waits for call {self._script.position.calls} of the script"
            case Finish():
                return "finished"

    def note_answered(self) -> None:
        """Which replies have arrived at the script, as far as the queues know now: all from before the checkpoint that
        this worker has begun at."""
        script = self._script
        for queue in () if script is None else script.replies:
            if script is not None and (outbound := self._outbound.opened.get(queue.name)) is not None:
                depth, per = outbound.depth(), queue.per
                arrived = script.position.of(per) - depth.ready - depth.in_flight
                self.progress.arrived(per, max(script.start.of(per), arrived))

    def lacks_room(self) -> None:
        """To be called while a `put` of this loop waits for room: a worker that waits does not hang."""
        command = self._machine.command
        if isinstance(command, Compute) and command.instruction.gives:
            self.progress.lacks_room(Take(command.instruction.gives[0], command.instruction), self._now())
        elif self._script is not None and (queue := self._script.answer) is not None:
            self.progress.lacks_room_for_reply(queue, self._script.position.calls, self._now())

    def poll(self, timeout: float) -> bool:
        """One turn: takes what the current instruction needs, waiting up to `timeout` seconds for each message, and
        carries it out. False if a message or credit did not come, or the program is over."""
        command = self._machine.command
        if type(command) is AwaitOrder:
            command = self._await_order(command, timeout)
            if type(command) is AwaitOrder:
                return False
        if type(command) is AwaitCredit:
            command = self._await_credit(command, timeout)
            if type(command) is AwaitCredit:
                return False
        while type(command) is Take:
            self.progress.waiting(command)
            inbound = self._inbound(command.queue)
            message = self._take(inbound, timeout)
            if message is None:
                return False
            command = self._machine.arrived(command.queue, *inbound.queue.at(message.number))
            self._received.append(message.payload)
        if type(command) is Compute:
            self._compute(command.instruction)
            return True
        return self._script is not None and self._between_instructions(self._script, timeout)

    def _take(self, inbound: Inbound, timeout: float) -> Message | None:
        """The next message. While there is none, the script's next call is looked at, which takes a while."""
        script = self._script
        if script is None or not script.looks_ahead:
            return inbound.take(timeout)
        message = inbound.take(0)
        if message is not None:
            return message
        if (call := self._inbound(script.calls).take(0)) is not None:
            script.look_at(call)
        return inbound.take(timeout)

    def _await_order(self, wanted: AwaitOrder, timeout: float) -> Command:
        """In a turn in which commands have come, or after `timeout` seconds, it is looked at again."""
        step, now = wanted.instruction.step, self._now()
        if self.orders is None or self.orders.is_open(step):
            self.progress.ordered()
            return self._machine.ordered()
        self.progress.waiting_for_order(step, now)
        if now - self.progress.since > LONGEST:
            raise OrderMissing(
                f"the broker has not told for {LONGEST:g} s by which schedule step {step} goes: see `stageline status`"
            )
        self._queues.pump(timeout)
        return wanted

    def _await_credit(self, wanted: AwaitCredit, timeout: float) -> Command:
        outbound, instruction = self._outbound.of(wanted.queue), wanted.instruction
        number = self.program.queues[wanted.queue].number(instruction.step, instruction.action.microbatch)
        if not outbound.has_credit(number, 0):
            self.progress.waiting(wanted)
            if not outbound.has_credit(number, timeout):
                return wanted
        return self._machine.granted()

    def _compute(self, instruction: Instruction) -> None:
        self.progress.computing(instruction, self._now())
        verdict = instruction.action.kind is Kind.VERDICT
        result = self._verdict() if verdict else self._carry_out(instruction, self._received)
        self._received.clear()
        self._outbound.put(instruction, result)
        if verdict:
            self._go_by(instruction, ends=bool(result))
        elif instruction.evaluates:
            self._end_evaluation(instruction, result)
        else:
            self.progress.done(instruction, self._now())
            if instruction.action.kind is Kind.UPDATE:
                self._end_step(instruction.action.stage, instruction.step)
        self._machine.computed()

    def _end_evaluation(self, instruction: Instruction, result: Tree) -> None:
        stage, batch, rounds = instruction.action.stage, instruction.step, self._plan_calls.rounds
        self.progress.evaluated(self._now())
        if self._script is not None:
            self._script.evaluated(stage, result)
        elif instruction.action.microbatch == self.program.schedule.microbatches - 1:
            if stage == self.program.last and rounds.ends_round(batch):
                self._note_round(self._executor.evaluated(rounds.step_of(batch)))
            self._queues.pump(0)

    def _note_round(self, found: EvaluationRecord) -> None:
        self.progress.found(found)
        if self._measured is not None:
            self._measured(evaluation_line(found.step, found.values, self._now(), None))

    def _verdict(self) -> bool:
        """Whether the run ends after the newest round of evaluation: as the last stage's worker was told by the figures
        of all rounds, and the others by that worker. Nothing else decides: each time, it is the same step."""
        if self._received:
            return bool(self._received[0])
        for record in self.progress.evaluations[self._judged :]:
            self._standing = self._standing.after(record.step, record.values)
        self._judged = len(self.progress.evaluations)
        return self._standing.stops

    def _go_by(self, instruction: Instruction, *, ends: bool) -> None:
        self.progress.evaluated(self._now())
        if ends:  # all others are told
            self._keep(self._plan_calls.step_at(instruction))
            self._machine.end()
        self._queues.pump(0)

    def _end_step(self, stage: int, step: int) -> None:
        last = stage == self.program.last
        loss, norm = (self._executor.loss, self._executor.gradient_norm) if last else (None, None)
        self.progress.closed(stage, step, loss, norm)
        if last and self._measured is not None:
            self._measured(self._metrics(step))
        self._on_step(stage, step, loss)
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

    def _between_instructions(self, script: CallSequence, timeout: float) -> bool:
        """One turn while nothing is to be computed: the open call is answered, or the next one is taken."""
        if script.open is not None:
            self._reply(script)
            return True
        return not script.over and self._take_call(script, timeout)

    def _reply(self, script: CallSequence) -> None:
        reply, queue = script.reply(), script.answer
        if queue is not None:
            self._outbound.put_reply(queue.name, script.position.of(queue.per), reply)
            self.progress.replied()
        trained = script.open is not None and script.open.kind is CallKind.TRAIN
        script.close()
        if not trained:  # the end of a training step has just done so
            self._queues.pump(0)

    def _take_call(self, script: CallSequence, timeout: float) -> bool:
        if self.progress.snapshots:  # which are reported once the script has the replies before them
            self.note_answered()
        message = script.take_next()
        if message is None:
            self.progress.waiting_for_script(self.program.queues[script.calls], script.position.calls, self._now())
            message = self._inbound(script.calls).take(timeout)
        if message is None:
            return False
        instructions = script.begin(message)
        trains = script.open is not None and script.open.kind is CallKind.TRAIN
        self.progress.called_to(script.position.after(CallKind.TRAIN) if trains else None)
        for batch in script.take_settled():
            for name in self._evaluation:
                self._outbound.of(name).empty(batch)
        self._machine.extend(instructions)
        return True
