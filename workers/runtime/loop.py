"""One worker: a machine that decides, an executor that computes, queues that carry, and the loop that joins them.

poll():  Take     the queue gives a message, or nothing yet: then this turn is over   -> machine
         Compute  the executor computes, the queue gets the result; then it is over   -> machine
"""

from collections.abc import Callable, Sequence
from functools import cache
from time import time
from typing import Protocol

from stageline.broker.codec.message import Message
from stageline.broker.queues.base import Outbound, QueueKey, Queues
from stageline.pipeline.numbering import message_number
from stageline.pipeline.schedule import Kind
from stageline.pipeline.tree import Tree

from .machine import Command, Compute, Finish, Instruction, Machine, Take
from .progress import Progress

OnStep = Callable[[int, int, float | None], None]

PATIENCE = 0.25  # seconds that one wait for a message lasts at most, before the worker looks around


class ActionExecutor(Protocol):
    """Carries out instructions: an `Executor`, or one that is watched."""

    @property
    def loss(self) -> float | None:
        """Of the last step, on the worker that has the last stage."""

    def carry_out(self, instruction: Instruction, received: Sequence[Tree]) -> Tree:
        """What `instruction` gives. Raises `ComputeFailed`."""

    def measured(self) -> dict[str, float]:
        """The metrics over all rows evaluated so far."""


class WorkerLoop:
    """Runs one worker's program. `run` and `incarnation` are written into the messages it puts."""

    def __init__(
        self,
        machine: Machine,
        executor: ActionExecutor,
        queues: Queues,
        *,
        run: str,
        incarnation: int,
        microbatches: int,
        last: int,
    ) -> None:
        self.progress = Progress()
        self._on_step: OnStep = lambda stage, step, loss: None
        self._machine = machine
        self._executor = executor
        self._queues = queues
        self._run = run
        self._incarnation = incarnation
        self._microbatches = microbatches
        self._last = last
        self._inbound = cache(queues.inbound)
        self._outbounds: dict[QueueKey, Outbound] = {}  # those that something was put into
        self._received: list[Tree] = []
        self._command: Command = machine.begin()

    def run(self, between: Callable[[], None], on_step: OnStep = lambda stage, step, loss: None) -> None:
        """Polls until the program is over. `between` is called before every turn, `on_step` after each update with the
        stage, the step and its loss; what they raise ends the loop."""
        self._on_step = on_step
        while not self.finished:
            between()
            if self.progress.depths_wanted:
                self._show_depths()
            self.poll(PATIENCE)
        self.progress.waits = self.progress.over = True

    @property
    def finished(self) -> bool:
        """Whether the program is over."""
        return isinstance(self._command, Finish)

    @property
    def step(self) -> int | None:
        """The step of the instruction at hand; None when the program is over."""
        return None if isinstance(self._command, Finish) else self._command.instruction.step

    @property
    def doing(self) -> str:
        """What the loop is at, in words."""
        match self._command:
            case Take(key, number, instruction):
                return f"{instruction} waits for message {number} of {key}"
            case Compute(instruction):
                return f"{instruction} is next"
            case Finish():
                return "finished"

    def lacks_room(self) -> None:
        """To be called while a `put` of this loop waits for room: a worker that waits does not hang."""
        if isinstance(self._command, Compute) and (key := self._command.instruction.gives) is not None:
            wanting = Take(key, self._number(self._command.instruction), self._command.instruction)
            self.progress.lacks_room(wanting, time())

    def poll(self, timeout: float) -> bool:
        """One turn: takes what the instruction at hand needs, waiting up to `timeout` seconds for each message, and
        carries it out. False if it had to wait in vain, or the program is over."""
        command = self._command
        while type(command) is Take:
            self.progress.waiting(command)
            message = self._inbound(command.key).take(timeout)
            if message is None:
                self._command = self._machine.timed_out()
                return False
            command = self._command = self._machine.arrived(command.key, message.step, message.microbatch)
            self._received.append(message.payload)
        if type(command) is not Compute:
            return False
        self._compute(command.instruction)
        return True

    def _compute(self, instruction: Instruction) -> None:
        self.progress.computing(instruction, time())
        result = self._executor.carry_out(instruction, self._received)
        self._received.clear()
        if instruction.gives is not None:
            self._put(instruction, instruction.gives, result)
        self.progress.done(instruction, time())
        if instruction.action.kind is Kind.UPDATE:
            self._close(instruction)
        elif instruction.evaluates:
            self._evaluated(instruction)
        self._command = self._machine.computed()

    def _put(self, instruction: Instruction, key: QueueKey, payload: Tree) -> None:
        if key not in self._outbounds:
            self._outbounds[key] = self._queues.outbound(key)
        step, microbatch, number = instruction.step, instruction.action.microbatch, self._number(instruction)
        message = Message(self._run, key.flow, step, microbatch, key.stage, self._incarnation, number, payload)
        self._outbounds[key].put(message)

    def _number(self, instruction: Instruction) -> int:
        return message_number(instruction.step, instruction.action.microbatch, self._microbatches)

    def _show_depths(self) -> None:
        self.progress.depths = {str(key): outbound.depth() for key, outbound in self._outbounds.items()}
        self.progress.depths_wanted = False

    def _evaluated(self, instruction: Instruction) -> None:
        self.progress.metrics = self._executor.measured()
        if instruction.action.microbatch == self._microbatches - 1:
            self.progress.closed(instruction.action.stage, instruction.step, None)
            self._queues.pump(0)

    def _close(self, instruction: Instruction) -> None:
        stage = instruction.action.stage
        loss = self._executor.loss if stage == self._last else None
        self.progress.closed(stage, instruction.step, loss)
        self._on_step(stage, instruction.step, loss)
        self._queues.pump(0)
