"""An action: one thing a worker does. Written `2F0`: stage 2, forward, microbatch 0.

An action takes from a queue and puts into one. A queue is named by what it carries and the stage that takes from it:

    stage 1  --- forward-2 --->   stage 2
    stage 1  <-- backward-1 ---   stage 2

Besides, two stages that share parameters are joined by queues of their own, which `Schedule` knows:

    stage 0  <-- tied-0 -------   stage 2      put by 2T, taken by 0B; or once per step:
    stage 0  <-- subtotal-0 ---   stage 2      put by 2S, taken by 0S
    stage 0  --- total-2 ----->   stage 2      put by 0U, taken by 2U

Where gradients are clipped by their norm over all stages, neighbours have two more, once per step:

    stage 1  <-- norms-1 ------   stage 2      put by 2N, taken by 1N
    stage 1  --- clip-2 ------>   stage 2      put by 1C, taken by 2C

Replicas of a stage send each other the sums of their gradients, once per step (`replicas.py` numbers and names them):

    stage 1.1  <-- sum-1.1-from-1.0 ---  stage 1.0      put by 1.0A, taken by 1.1U
"""

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action computes for its stage."""

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
    VERDICT = "V"  # in no schedule: after an evaluation, whether a run that may end early goes on
    ORDER = "O"  # in no schedule: before a step of a run that chooses its schedule, by which one it goes

    __hash__ = str.__hash__  # Enum's own is slow Python code, and runs for every action of a program


ENDS_MICROBATCH = (Kind.BACKWARD, Kind.WEIGHT)  # computes gradients of weights; nothing is left of it in its stage
ONCE_PER_STEP = (Kind.SUBTOTAL, Kind.ADD, Kind.NORMS, Kind.CLIP, Kind.UPDATE)  # in this order; their microbatch is 0


# What a microbatch goes through at a stage, up to an action of each kind.
_WAY = {
    Kind.FORWARD: (Kind.FORWARD,),
    Kind.INPUT: (Kind.FORWARD, Kind.INPUT),
    Kind.WEIGHT: (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT),
}

_CARRIED = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "backward"}


class Action(NamedTuple):
    """One thing a worker does: `kind`, for `stage` and `microbatch`, both from 0."""

    kind: Kind
    stage: int
    microbatch: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.name}"

    @property
    def name(self) -> str:
        """Without its stage: "F0", "U"."""
        once = self.kind in ONCE_PER_STEP or self.kind in (Kind.VERDICT, Kind.ORDER)
        return str(self.kind) if once else f"{self.kind}{self.microbatch}"

    @property
    def way(self) -> tuple["Action", ...]:
        """The actions on the same microbatch, at the same stage, that lead to it, and itself."""
        return tuple(self._replace(kind=kind) for kind in _WAY.get(self.kind, (Kind.FORWARD, Kind.BACKWARD)))

    @property
    def inbound(self) -> str:
        """The queue that it takes from, "" for none. At the ends of the pipeline there is no queue of that name."""
        return f"{_CARRIED[self.kind]}-{self.stage}" if self.kind in _CARRIED else ""

    @property
    def outbound(self) -> str:
        """The queue that it puts into, named in the same way."""
        consumer = self.stage + 1 if self.kind is Kind.FORWARD else self.stage - 1
        return f"{_CARRIED[self.kind]}-{consumer}" if self.kind in _CARRIED and consumer >= 0 else ""


Lists = tuple[tuple[Action, ...], ...]  # the actions of each worker in one step
