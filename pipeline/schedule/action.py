"""Actions: the computations of a worker. Written `2F0`: stage 2, forward, microbatch 0.

An action takes from a queue and puts into one. A queue is named by the data it carries and the stage that takes from
it:

    stage 1  --- forward-2 --->   stage 2
    stage 1  <-- backward-1 ---   stage 2

Passes of `pipeline/program` add actions and queues: for parameters that stages share, for norms, for replicas.
"""

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """Kinds of actions known to schedules. A feature may have others: each is one letter."""

    FORWARD = "F"
    BACKWARD = "B"  # both gradients at once
    INPUT = "I"  # the gradient with respect to the stage's input; the stage before waits for it
    WEIGHT = "W"  # the gradient with respect to the weights; only the update waits for it
    TIED = "T"  # sends the gradients of parameters that a stage before uses too; it waits for them
    SUBTOTAL = "S"  # the same, once per step: adds up what the stages that share them have
    ADD = "A"  # once per step: sends the sums of gradients to the other replicas of the stage, which add them
    NORMS = "N"  # once per step: the norms of gradients, of this stage and of those after it
    CLIP = "C"  # once per step: clips the gradients by the norm over all stages
    UPDATE = "U"  # the optimizer; once per step, with no microbatch of its own

    __hash__ = str.__hash__  # Enum's own is slow Python code, and runs for every action of a program


ENDS_MICROBATCH = (Kind.BACKWARD, Kind.WEIGHT)  # computes gradients of weights; nothing is left of it in its stage
ONCE_PER_STEP = (Kind.SUBTOTAL, Kind.ADD, Kind.NORMS, Kind.CLIP, Kind.UPDATE)  # in this order; their microbatch is 0
PER_MICROBATCH = frozenset(Kind) - set(ONCE_PER_STEP)


# What a microbatch goes through at a stage, up to an action of each kind.
_WAY: dict[str, tuple[Kind, ...]] = {
    Kind.FORWARD: (Kind.FORWARD,),
    Kind.INPUT: (Kind.FORWARD, Kind.INPUT),
    Kind.WEIGHT: (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT),
}

_CARRIED: dict[str, str] = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "backward"}


class Action(NamedTuple):
    """A computation of a worker: its `kind`, and the `stage` and `microbatch` it is for, both counted from 0."""

    kind: str
    stage: int
    microbatch: int = 0

    def __str__(self) -> str:
        """Return the action for people: "2F0"."""
        return f"{self.stage}{self.name}"

    @property
    def name(self) -> str:
        """Name without the stage: "F0", "U"."""
        return str(self.kind) if self.kind in ONCE_PER_STEP else f"{self.kind}{self.microbatch}"

    @property
    def way(self) -> tuple["Action", ...]:
        """Actions on the same microbatch at the same stage that lead to this action, in order, and this action."""
        return tuple(self._replace(kind=kind) for kind in _WAY.get(self.kind, (Kind.FORWARD, Kind.BACKWARD)))

    @property
    def inbound(self) -> str:
        """Name of the queue that the action takes from, "" for none.

        The name is given for the ends of the pipeline, too, where no such queue exists.
        """
        return f"{_CARRIED[self.kind]}-{self.stage}" if self.kind in _CARRIED else ""

    @property
    def outbound(self) -> str:
        """Name of the queue that the action puts into, "" for none.

        The name is given for the last stage, too, where no such queue exists.
        """
        consumer = self.stage + 1 if self.kind is Kind.FORWARD else self.stage - 1
        return f"{_CARRIED[self.kind]}-{consumer}" if self.kind in _CARRIED and consumer >= 0 else ""


Lists = tuple[tuple[Action, ...], ...]  # the actions of each worker in one step


# These actions of its stage on the previous microbatch, so that messages are numbered and gradients added in the order
# of microbatches.
AFTER_PREVIOUS: dict[str, tuple[Kind, ...]] = {
    Kind.FORWARD: (Kind.FORWARD,),
    Kind.BACKWARD: (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.TIED),
    Kind.INPUT: (Kind.BACKWARD, Kind.INPUT),
    Kind.WEIGHT: (Kind.BACKWARD, Kind.WEIGHT, Kind.TIED),
    Kind.TIED: (Kind.TIED,),
}

# These actions of its stage on the same microbatch, since it builds on them.
BUILDS_ON: dict[str, tuple[Kind, ...]] = {
    Kind.BACKWARD: (Kind.FORWARD,),
    Kind.INPUT: (Kind.FORWARD,),
    Kind.WEIGHT: (Kind.INPUT,),
    Kind.TIED: (Kind.BACKWARD, Kind.WEIGHT),
}
