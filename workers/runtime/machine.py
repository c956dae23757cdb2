"""One worker's state machine: events in, commands out. It decides what happens next and does nothing itself.

                    Begin
        IDLE ------------------+
                               v                Arrived
        (take the program's next action)  <-- WAITING ---+
              |          |         |            ^        |
              | needs    | needs   | nothing    | Take   v
              | messages | nothing | left       |     COMPUTING
              v          v         v            |        |
           WAITING   COMPUTING  FINISHED        +--------+ Computed
                                                (and again from the top)
    TimedOut leaves it WAITING, with a name for what it waits for.

The order of actions is the schedule's and nothing else's: neither time nor the order of arrival changes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import msgspec

from stageline.broker.codec.message import Flow
from stageline.broker.queues.base import QueueKey
from stageline.pipeline.numbering import message_number
from stageline.pipeline.schedule import Action, Kind, Schedule, forward_only


class MachineState(StrEnum):
    IDLE = "idle"
    WAITING = "waiting"
    COMPUTING = "computing"
    FINISHED = "finished"


class Instruction(msgspec.Struct, frozen=True):
    """An action of one step with the queues it takes from and gives to. `evaluates`: no stash, no gradient."""

    step: int
    action: Action
    takes: tuple[QueueKey, ...]
    gives: QueueKey | None
    evaluates: bool = False

    def __str__(self) -> str:
        return f"{self.action} of step {self.step}"


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
    """An event came that the machine's state has no place for: a bug, or a message of another place in the run."""


@dataclass(frozen=True, slots=True)
class Route:
    """How the stages of a run are joined: what every instruction takes and gives follows from it.

    `fed` says that batches and targets come through queues from a user's own loader, not from data sources; what the
    last stage computes then goes back to that loader, as if to a stage after it.
    """

    stages: int
    first_trainable: int = 0
    fed: bool = False

    def takes(self, action: Action) -> tuple[QueueKey, ...]:
        last = action.stage == self.stages - 1
        match action.kind:
            case Kind.FORWARD:
                inputs = (QueueKey(Flow.FORWARD, action.stage),) if action.stage or self.fed else ()
                targets = (QueueKey(Flow.TARGET, action.stage),) if last and self.fed else ()
                return inputs + targets
            case Kind.BACKWARD:
                return () if last else (QueueKey(Flow.BACKWARD, action.stage),)
            case _:
                return ()

    def gives(self, action: Action) -> QueueKey | None:
        if action.kind is Kind.FORWARD and (self.fed or action.stage < self.stages - 1):
            return QueueKey(Flow.FORWARD, action.stage + 1)
        if action.kind is Kind.BACKWARD and action.stage > self.first_trainable:
            return QueueKey(Flow.BACKWARD, action.stage - 1)
        return None

    def queues(self) -> list[QueueKey]:
        """Every queue between stages; those that a user's loader fills are not among them."""
        forward = [QueueKey(Flow.FORWARD, stage) for stage in range(1, self.stages)]
        backward = [QueueKey(Flow.BACKWARD, stage) for stage in range(self.first_trainable, self.stages - 1)]
        return forward + backward

    @staticmethod
    def producer(key: QueueKey) -> int:
        """The stage that puts into `key`."""
        return key.stage - 1 if key.flow is Flow.FORWARD else key.stage + 1


def program(
    schedule: Schedule, route: Route, worker: int, steps: range, evaluation: range = range(0)
) -> Iterator[Instruction]:
    """Everything one worker does: the schedule over `steps`, then forward only over `evaluation`."""
    routed = cache(lambda action: (route.takes(action), route.gives(action)))
    for step, action in schedule.program(worker, steps):
        yield Instruction(step, action, *routed(action))
    for step, action in forward_only(schedule.placement, schedule.microbatches).program(worker, evaluation):
        yield Instruction(step, action, *routed(action), evaluates=True)


class Machine:
    """Walks one worker through its program. Every method is an event and returns the command that answers it."""

    def __init__(self, instructions: Iterator[Instruction], microbatches: int) -> None:
        self._instructions = instructions
        self._microbatches = microbatches
        self._lacking: list[Take] = []  # what the instruction at hand still waits for, the next one last
        self.instruction: Instruction | None = None
        self.state = MachineState.IDLE

    def begin(self) -> Command:
        """The worker is ready for its first action."""
        if self.state is not MachineState.IDLE:
            raise self._out_of_place("the beginning", MachineState.IDLE)
        return self._next()

    def arrived(self, key: QueueKey, step: int, microbatch: int) -> Command:
        """The message of (`step`, `microbatch`) was taken from `key`."""
        if self.state is not MachineState.WAITING:
            raise self._out_of_place("a message", MachineState.WAITING)
        wanted = self._lacking.pop()
        if key != wanted.key or message_number(step, microbatch, self._microbatches) != wanted.number:
            action = wanted.instruction.action
            raise OutOfPlace(
                f"microbatch {microbatch} of step {step} arrived on {key}, but {wanted.instruction} needs "
                f"microbatch {action.microbatch} of step {wanted.instruction.step} on {wanted.key}"
            )
        if self._lacking:
            return self._lacking[-1]
        self.state = MachineState.COMPUTING
        return Compute(wanted.instruction)

    def timed_out(self) -> Command:
        """Nothing arrived yet: wait on."""
        if self.state is not MachineState.WAITING:
            raise self._out_of_place("a time-out", MachineState.WAITING)
        return self._lacking[-1]

    def computed(self) -> Command:
        """The instruction was carried out and what it gives was put."""
        if self.state is not MachineState.COMPUTING:
            raise self._out_of_place("a result", MachineState.COMPUTING)
        return self._next()

    def _next(self) -> Command:
        instruction = self.instruction = next(self._instructions, None)
        if instruction is None:
            self.state = MachineState.FINISHED
            return Finish()
        if not instruction.takes:
            self.state = MachineState.COMPUTING
            return Compute(instruction)
        number = message_number(instruction.step, instruction.action.microbatch, self._microbatches)
        self._lacking = [Take(key, number, instruction) for key in reversed(instruction.takes)]
        self.state = MachineState.WAITING
        return self._lacking[-1]

    def _out_of_place(self, event: str, wanted: MachineState) -> OutOfPlace:
        return OutOfPlace(f"{event} came while the machine was {self.state}, not {wanted}")
