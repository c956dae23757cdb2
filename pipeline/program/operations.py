"""Operations of a worker's program, and their queues, as data.

An instruction is an operation in one step of a run. A queue says its name, its ends, how its messages are numbered, and
how far it may run ahead:

forward-2              activations, from stage 1 to stage 2
backward-1             gradients, from stage 2 to stage 1
forward-2.1-from-1.0   where stages have replicas: from copy 1.0 to copy 2.1
evaluation-2           activations of evaluated batches, from stage 1 to stage 2
call-1, reply-1        from a script to worker 1, and back
copies-0-1             snapshots, from worker 0 to worker 1
"""

import re
from enum import StrEnum
from typing import Annotated

import msgspec

from stageline.pipeline.schedule import Action

LONGEST_NAME = 64
_NAME = rf"^[!-~]{{1,{LONGEST_NAME}}}\Z"
QueueName = Annotated[str, msgspec.Meta(pattern=_NAME)]  # as it travels in the header of each message
Place = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

FEW = 16  # messages that are small and come one a call, round or step: more than are under way, to spare requests


class Per(StrEnum):
    """Units that a queue's messages are numbered by, and that an operation runs once for."""

    MICROBATCH = "microbatch"  # of a training step
    STEP = "step"  # of training
    EVALUATED = "evaluated"  # microbatch of an evaluated batch; batches are numbered over the run
    ROUND = "round"  # of evaluation
    CALL = "call"  # of a script
    REPLY = "reply"  # to a script's calls that do not train
    CHUNK = "chunk"  # of snapshots; no step has a fixed number of them

    __hash__ = str.__hash__

    @property
    def many(self) -> bool:
        """True if a step, or an evaluated batch, has a message for each microbatch."""
        return self in (Per.MICROBATCH, Per.EVALUATED)


_UNITS = {
    Per.CALL: "call",
    Per.REPLY: "reply",
    Per.EVALUATED: "evaluated batch",
    Per.ROUND: "round",
    Per.CHUNK: "chunk",
}


class Queue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A queue of a run. A worker sends the broker the queues that it has an end of.

    Attributes:
        name: Data that the queue carries and the stage that takes from it: "forward-2".
        producer: Place of the process that puts messages: the index of a worker, or the place of the script.
        consumer: Place of the process that takes messages.
        source: Stage (with replicas: the copy) whose results the queue carries. None for a script's queues.
        target: Stage, or copy, that takes them. None where a worker as a whole does.
        per: Unit that messages are numbered by.
        count: Messages of a step, or of the other unit that `per` names.
        carried: Microbatches of a step that the queue carries, in the order of its messages. Empty for 0, 1, ...,
            count - 1.
        window: Messages that the consumer lets the producer send ahead. None if the schedule's bound decides.
        codec: Name of the codec that encodes the tensors.
        begins: First step that has messages in the queue.
        ends: Step from which on no message is put. None if all steps have messages.
        signals: True if the messages have no content.
    """

    name: QueueName
    producer: Place
    consumer: Place
    source: Place | None = None
    target: Place | None = None
    per: Per = Per.MICROBATCH
    count: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] = 1
    carried: tuple[Place, ...] = ()
    window: Annotated[int, msgspec.Meta(ge=1)] | None = None
    codec: Annotated[str, msgspec.Meta(max_length=100)] = "lossless"
    begins: int = 0
    ends: int | None = None
    signals: bool = False

    def __post_init__(self) -> None:
        """Raise `ValueError` for a wrong name or window, or for `carried` without `count` microbatches."""
        if not re.match(_NAME, self.name):
            raise ValueError(
                f"{self.name!r} is no name for a queue, which has 1 to {LONGEST_NAME} printable ASCII characters"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"queue {self.name} has window={self.window}; expected at least 1, or none: then the schedule decides"
            )
        if self.carried and len(self.carried) != self.count:
            raise ValueError(f"queue {self.name} has {self.count} messages a step, and carried has {len(self.carried)}")

    @property
    def flow(self) -> str:
        """Data that the queue carries, as the first part of its name: "forward"."""
        return self.name.partition("-")[0]

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Microbatches of the messages, in their order; (0,) where each step has one message."""
        return self.carried or tuple(range(self.count))

    def number(self, unit: int, microbatch: int) -> int:
        """Return the number of a message.

        Args:
            unit: Step, or the other unit that `per` names.
            microbatch: Microbatch of the unit. Not used where a unit has one message.
        """
        if not self.per.many:
            return unit
        return unit * self.count + (self.carried.index(microbatch) if self.carried else microbatch)

    def at(self, number: int) -> tuple[int, int]:
        """Return the step (or the other unit that `per` names) and the microbatch of message `number`."""
        unit, place = divmod(number, self.count)
        return unit, self.carried[place] if self.carried else place

    def first(self, unit: int) -> int:
        """Return the number of the first message of a step, or of the other unit that `per` names."""
        return unit * self.count

    @property
    def unit(self) -> str:
        """Name of what the queue's messages are of, one or more each, for people: "step", "call"."""
        return _UNITS.get(self.per, "step")

    @property
    def is_local(self) -> bool:
        """True if the queue begins and ends at one worker."""
        return self.producer == self.consumer

    @property
    def copies(self) -> bool:
        """True if the queue carries snapshots, and nothing that is computed."""
        return self.per is Per.CHUNK

    @property
    def answers(self) -> bool:
        """True if the queue brings a script the results of its calls."""
        return self.source is None and self.target is None and self.per in (Per.STEP, Per.REPLY)

    def differing(self, other: "Queue") -> str:
        """Return the first attribute in which the queue differs from `other` of its name, "" if there is none.

        Windows and codecs do not count: each end has the plan's.
        """
        names = ("producer", "consumer", "source", "target", "per", "count", "carried", "begins", "ends", "signals")
        return next((name for name in names if getattr(self, name) != getattr(other, name)), "")

    def within(self, floor: int) -> int:
        """Return the step nearest to `floor` that bounds messages of this queue.

        A consumer that takes no more messages stays at the queue's last bound, so that it is not told of messages that
        never came.
        """
        return max(self.begins, floor if self.ends is None else min(floor, self.ends))


def in_order(microbatches: tuple[int, ...]) -> tuple[int, ...]:
    """Return `Queue.carried` for these microbatches: empty if they are 0, 1, 2, ..."""
    return () if microbatches == tuple(range(len(microbatches))) else microbatches


class Op(msgspec.Struct, frozen=True):
    """An entry of a worker's program.

    Attributes:
        action: Action to compute: a kind, for a stage and a microbatch.
        name: The action for people: "1F0".
        per: Unit that the operation runs once for.
        takes: Names of the queues whose next messages the operation needs, in the order in which it takes them.
        gives: Names of the queues that the result is put into.
        awaits: Queue whose consumer says when the operation may be computed, since no gradient comes back. Empty for
            none.
        marks: Words that a feature has left for the code that carries the operation out.
    """

    action: Action
    name: str
    per: Per = Per.MICROBATCH
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    awaits: str = ""
    marks: tuple[str, ...] = ()


class Instruction(msgspec.Struct, frozen=True):
    """An operation in one `step`: of training, or of the other unit that the operation runs once for."""

    step: int
    op: Op

    @property
    def action(self) -> Action:
        """Action to compute."""
        return self.op.action

    @property
    def kind(self) -> str:
        """Kind of the action: "F"."""
        return self.op.action.kind

    @property
    def stage(self) -> int:
        """Stage, or copy, that the action is computed for."""
        return self.op.action.stage

    @property
    def microbatch(self) -> int:
        """Microbatch of the step; 0 for an action of the whole step."""
        return self.op.action.microbatch

    @property
    def name(self) -> str:
        """The action for people: "1F0"."""
        return self.op.name

    @property
    def takes(self) -> tuple[str, ...]:
        """Names of the queues whose next messages the instruction needs."""
        return self.op.takes

    @property
    def gives(self) -> tuple[str, ...]:
        """Names of the queues that the result is put into."""
        return self.op.gives

    @property
    def evaluates(self) -> bool:
        """True if the instruction belongs to an evaluated batch: no stash, no gradient."""
        return self.op.per is Per.EVALUATED

    @property
    def counted(self) -> bool:
        """True if the step is one of training, which the ledger knows."""
        return not self.evaluates

    def __str__(self) -> str:
        """Return the instruction for people: "1F0 of step 3"."""
        return f"{self.name} of {'evaluated batch' if self.evaluates else 'step'} {self.step}"
