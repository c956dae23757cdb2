"""An action: one thing a worker does. Written `2F0`: stage 2, forward, microbatch 0."""

import re
from enum import StrEnum
from typing import NamedTuple, Self


class Kind(StrEnum):
    """What an action computes for its stage."""

    FORWARD = "F"
    BACKWARD = "B"  # both gradients at once
    INPUT = "I"  # the gradient with respect to the stage's input; the stage before waits for it
    WEIGHT = "W"  # the gradient with respect to the weights; only the update waits for it
    UPDATE = "U"  # the optimizer; once per step, with no microbatch of its own

    __hash__ = str.__hash__  # Enum's own is slow Python code, and runs for every action of a program


_WRITTEN = re.compile(r"(?a:(?P<stage>\d+)(?:(?P<kind>[FBIW])(?P<microbatch>\d+)|U))")


class Action(NamedTuple):
    """One thing a worker does: `kind`, for `stage` and `microbatch`, both from 0. An update's microbatch is 0."""

    kind: Kind
    stage: int
    microbatch: int = 0

    def __str__(self) -> str:
        if self.kind is Kind.UPDATE:
            return f"{self.stage}U"
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises `ValueError` for any other text."""
        match = _WRITTEN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not an action; one is written like 2F0 (stage 2, forward, microbatch 0) or 2U"
            )
        return cls(Kind(match["kind"] or "U"), int(match["stage"]), int(match["microbatch"] or 0))
