"""One worker's state machine: events in, commands out. It decides what happens next and does nothing itself.

                  (the program's next instruction)
                     |             |          |
     needs messages  |    nothing  |          |  nothing left
                     v             v          v
       +---------> Take ------> Compute     Finish
       |  arrived,  |   arrived,   |
       +-- another -+   the last   +-- computed: again from the top

The order of actions is the schedule's and nothing else's: neither time nor the order of arrival changes it.
"""

from collections.abc import Iterator

import msgspec

from stageline.broker.queues.base import QueueKey
from stageline.pipeline.numbering import message_number

from .program import Instruction


class Take(msgspec.Struct, frozen=True):
    """Command: wait for message `number` of `key`, which `instruction` needs."""

    key: QueueKey
    number: int
    instruction: Instruction


class Compute(msgspec.Struct, frozen=True):
    """Command: carry out `instruction`; all that it takes is there."""

    instruction: Instruction


class Finish(msgspec.Struct, frozen=True):
    """Command: the program is over."""


Command = Take | Compute | Finish


class OutOfPlace(Exception):
    """An event came that does not answer the command: a bug, or a message of another place in the run."""


class Machine:
    """Walks one worker through its program. Its methods are events and return the next `command`."""

    def __init__(self, instructions: Iterator[Instruction], microbatches: int) -> None:
        self._instructions = instructions
        self._microbatches = microbatches
        self._missing: list[Take] = []  # what the current instruction still waits for, the next one last
        self.command: Command = self._next()

    def arrived(self, key: QueueKey, step: int, microbatch: int) -> Command:
        """The message of (`step`, `microbatch`) was taken from `key`."""
        wanted = self.command
        if type(wanted) is not Take:
            raise OutOfPlace(f"a message of {key} arrived, and none was asked for: {wanted} is the command")
        if key != wanted.key or message_number(step, microbatch, self._microbatches) != wanted.number:
            action = wanted.instruction.action
            raise OutOfPlace(
                f"microbatch {microbatch} of step {step} arrived on {key}, but {wanted.instruction} needs "
                f"microbatch {action.microbatch} of step {wanted.instruction.step} on {wanted.key}"
            )
        self._missing.pop()
        self.command = self._missing[-1] if self._missing else Compute(wanted.instruction)
        return self.command

    def computed(self) -> Command:
        """The instruction was carried out and what it gives was put."""
        if type(self.command) is not Compute:
            raise OutOfPlace(f"a result came, and nothing was to be computed: {self.command} is the command")
        self.command = self._next()
        return self.command

    def _next(self) -> Command:
        instruction = next(self._instructions, None)
        if instruction is None:
            return Finish()
        if not instruction.takes:
            return Compute(instruction)
        number = message_number(instruction.step, instruction.action.microbatch, self._microbatches)
        self._missing = [Take(key, number, instruction) for key in reversed(instruction.takes)]
        return self._missing[-1]
