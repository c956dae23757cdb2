"""An action: one thing a worker does. Written `2F0`: stage 2, forward, microbatch 0."""

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action computes for its stage."""

    FORWARD = "F"
    BACKWARD = "B"  # both gradients at once
    INPUT = "I"  # the gradient with respect to the stage's input; the stage before waits for it
    WEIGHT = "W"  # the gradient with respect to the weights; only the update waits for it
    UPDATE = "U"  # the optimizer; once per step, with no microbatch of its own

    __hash__ = str.__hash__  # Enum's own is slow Python code, and runs for every action of a program


class Action(NamedTuple):
    """One thing a worker does: `kind`, for `stage` and `microbatch`, both from 0. An update's microbatch is 0."""

    kind: Kind
    stage: int
    microbatch: int = 0

    def __str__(self) -> str:
        if self.kind is Kind.UPDATE:
            return f"{self.stage}U"
        return f"{self.stage}{self.kind}{self.microbatch}"
