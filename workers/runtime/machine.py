"""The state machine of one worker: events in, commands out. It decides what happens next and does nothing itself.

                  (the program's next instruction)
                     |             |          |
     needs messages  |    nothing  |          |  nothing left
                     v             v          v
       +---------> Take ------> Compute     Finish
       |  arrived,  |   arrived,   |
       +-- another -+   the last   +-- computed: again from the top

An instruction that needs credit is preceded by `AwaitCredit`: granted, it goes on as the others do. One of a training
step that is `held` back is preceded by `Closed` until that step may be begun. Nothing is left between two calls; the
next one's instructions `extend` the program.

The order of actions is the schedule's and nothing else's: neither time nor the order of arrival changes it.
"""

from collections.abc import Iterator

import msgspec

from stageline.pipeline.program import Instruction


class Take(msgspec.Struct, frozen=True):
    """The command to wait for the message of `queue` that `instruction` needs."""

    queue: str
    instruction: Instruction


class AwaitCredit(msgspec.Struct, frozen=True):
    """The command to wait until the consumer of `queue` grants the message that `instruction` gives."""

    queue: str
    instruction: Instruction


class Compute(msgspec.Struct, frozen=True):
    """The command to carry out `instruction`: all that it takes has arrived."""

    instruction: Instruction


class Finish(msgspec.Struct, frozen=True):
    """The command to wait for the next call: the open one is over."""


class Closed(msgspec.Struct, frozen=True):
    """The command to wait until the training step of `instruction` may be begun: the run pauses before it."""

    instruction: Instruction


Command = Closed | AwaitCredit | Take | Compute | Finish


class OutOfPlace(Exception):
    """Error that an event does not answer the command: a bug, or a message of another place in the run."""


class Machine:
    """The state machine that walks one worker through its program.

    Its methods are events, and return the next command. Each raises `OutOfPlace` if it does not answer the present one.

    Attributes:
        command: The present command.
        begun: The first training step that is not begun.
        held: The first training step that may not be begun; None if any may.
    """

    def __init__(self, instructions: Iterator[Instruction], begun: int = 0) -> None:
        """Begin with the first of `instructions`, before which the steps below `begun` were begun."""
        self._instructions = instructions
        self.begun = begun
        self.held: int | None = None
        self._missing: list[Take] = []  # what the current instruction still waits for, the next one last
        self.command: Command = self._next()

    def hold(self, step: int | None) -> int | None:
        """Begin no training step from `step` on, or from the first one on that is not begun; None: any may be begun.

        Returns the first step that is held back.
        """
        self.held = None if step is None else max(step, self.begun)
        if type(self.command) is Closed:
            self.command = self._entered(self.command.instruction)
        return self.held

    def granted(self) -> Command:
        """Note that the consumer grants the message of the current instruction, and return the next command."""
        if type(self.command) is not AwaitCredit:
            raise OutOfPlace(f"credit came, and none was waited for: {self.command} is the command")
        self.command = self._needed(self.command.instruction)
        return self.command

    def arrived(self, queue: str, step: int, microbatch: int) -> Command:
        """Note that a message was taken from `queue`, and return the next command.

        Args:
            queue: Name of the queue.
            step: Step of the message.
            microbatch: Microbatch of the message.

        Raises:
            OutOfPlace: The current instruction needs another message, or none.
        """
        wanted = self.command
        if type(wanted) is not Take:
            raise OutOfPlace(f"a message of {queue} arrived, and none was asked for: {wanted} is the command")
        instruction, action = wanted.instruction, wanted.instruction.op.action
        if queue != wanted.queue or step != instruction.step or microbatch != action.microbatch:
            raise OutOfPlace(
                f"microbatch {microbatch} of step {step} arrived on {queue}, but {instruction} needs "
                f"microbatch {action.microbatch} of step {instruction.step} on {wanted.queue}"
            )
        self._missing.pop()
        self.command = self._missing[-1] if self._missing else Compute(instruction)
        return self.command

    def computed(self) -> Command:
        """Note that the instruction was carried out and its results were put, and return the next command."""
        if type(self.command) is not Compute:
            raise OutOfPlace(f"a result came, and nothing was to be computed: {self.command} is the command")
        self.command = self._next()
        return self.command

    def extend(self, instructions: Iterator[Instruction]) -> Command:
        """Continue the program, which is at its end, with `instructions`, and return the next command."""
        if type(self.command) is not Finish:
            raise OutOfPlace(f"the program is extended before its end: {self.command} is the command")
        self._instructions = instructions
        self.command = self._next()
        return self.command

    def _next(self) -> Command:
        instruction = next(self._instructions, None)
        return Finish() if instruction is None else self._entered(instruction)

    def _entered(self, instruction: Instruction) -> Command:
        """Return the first command for `instruction`, which may be held back."""
        if instruction.step >= self.begun and instruction.counted:
            if self.held is not None and instruction.step >= self.held:
                return Closed(instruction)
            self.begun = instruction.step + 1
        if instruction.op.awaits:
            return AwaitCredit(instruction.op.awaits, instruction)
        return self._needed(instruction)

    def _needed(self, instruction: Instruction) -> Command:
        """Return the first command for `instruction`: to take a message, or to compute if it takes none."""
        if not instruction.op.takes:
            return Compute(instruction)
        self._missing = [Take(queue, instruction) for queue in reversed(instruction.op.takes)]
        return self._missing[-1]
