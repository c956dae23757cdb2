"""Losses of a step on the worker of the last stage, and the errors that name a microbatch."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from torch import Tensor

from stageline.pipeline.errors import StagelineError
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.schedule.replicas import Replicas
from stageline.pipeline.tree import Tree


@dataclass(frozen=True, slots=True)
class Culprit:
    """The microbatch that failed.

    Attributes:
        step: Step of the microbatch.
        action: Action that failed, with its stage.
        gave: Result of the action, such as a loss that is not finite.
    """

    step: int
    action: Action
    gave: Tree = None


class ComputeFailed(StagelineError):
    """Error that the user's model, loss, metric or data raised while a stage computed.

    Mend: Mend the line that the message names. `stageline replay` runs the recorded microbatch again, under a debugger.
    After `CUDA out of memory` see docs/guides/memory.md.

    Example: stage 1 failed in 1F3, layer 4: KeyError: 7 (net.py, line 9, in loss)
    """

    error_code = "SL203"

    def __init__(self, reason: str, culprit: Culprit | None = None) -> None:
        """Take the text, and the microbatch that failed if one can be run again by itself."""
        super().__init__(reason)
        self.culprit = culprit


class BadMicrobatch(ComputeFailed):
    """Error that the loss of a microbatch is not a finite number.

    Mend: Look at that batch, or lower the learning rate. `recovery.skip` leaves bad microbatches out; `stageline
    replay` computes it again.

    Example: the loss of microbatch 3 of step 118 is nan on stage 1: the run stops before the update that would spread
    it. Look at that batch, or lower the learning rate.
    """

    error_code = "SL204"


@dataclass(frozen=True, slots=True)
class MicrobatchLoss:
    """The loss of a microbatch, weighted by its `rows`: float [], None for a microbatch that does not count."""

    microbatch: int
    loss: Tensor | None
    rows: int


class StepLosses:
    """The losses of the microbatches of the open step, in their order."""

    def __init__(self, last: int, copies: Collection[int], replicas: Replicas) -> None:
        """Begin a step.

        Args:
            last: Number of the model's last stage, the one with the loss.
            copies: Copies of stages that this worker has.
            replicas: All copies of all stages.
        """
        self.last = last
        self._copies = copies
        self._replicas = replicas
        self._losses: list[Tensor | None] = []  # None for one that does not count
        self._rows: list[int] = []

    @property
    def newest(self) -> Tensor | None:
        """The loss of the newest microbatch; None if it does not count."""
        return self._losses[-1]

    @property
    def rows(self) -> int:
        """The number of rows that count."""
        return sum(self._rows)

    def add(self, output: Tree, rows: int) -> None:
        """Add the loss of the next microbatch. One without rows does not count."""
        self._losses.append(output if rows and isinstance(output, Tensor) else None)
        self._rows.append(rows)

    def leave_out(self, microbatch: int) -> None:
        """Count microbatch `microbatch` as none, be it the newest or the next one."""
        self._losses[microbatch:] = [None]
        self._rows[microbatch:] = [0]

    def of(self, group: Sequence[int]) -> tuple[MicrobatchLoss, ...]:
        """Return the losses with the numbers of their microbatches, which are `group`."""
        return tuple(map(MicrobatchLoss, group, self._losses, self._rows))

    def set(self, found: Sequence[MicrobatchLoss]) -> None:
        """Replace the losses by those of all replicas."""
        self._losses, self._rows = [each.loss for each in found], [each.rows for each in found]

    def clear(self) -> None:
        """Begin the next step."""
        self._losses.clear()
        self._rows.clear()

    def total(self, step: int) -> float | None:
        """Return the loss of the step; None if it has no rows.

        Raises `BadMicrobatch` if a microbatch's loss, or their sum, is not finite.
        """
        counted = [loss for loss in self._losses if loss is not None]
        value = reduce(add, counted).item() if counted else None
        if value is not None and not math.isfinite(value):
            self._demand_finite(step, enumerate(self._losses))
            raise BadMicrobatch(f"the loss of step {step} is not finite although each microbatch's is: they overflow")
        return value

    def demand_finite(self, step: int, group: Sequence[int]) -> None:
        """Raise `BadMicrobatch` for the first loss that is not finite, of the microbatches of `group`."""
        self._demand_finite(step, zip(group, self._losses, strict=False))  # a trial has one microbatch

    def _demand_finite(self, step: int, losses: Iterable[tuple[int, Tensor | None]]) -> None:
        for number, loss in losses:
            if loss is not None and not math.isfinite(loss.item()):
                raise BadMicrobatch(
                    f"the loss of microbatch {number} of step {step} is {loss.item()} on stage {self.last}: the run "
                    f"stops before the update that would spread it. Look at that batch, or lower the learning rate.",
                    self._culprit(step, number, loss),
                )

    def _culprit(self, step: int, number: int, loss: Tensor) -> Culprit | None:
        """Return the microbatch whose loss is not finite; None if another replica has it."""
        copy = self._replicas.having(self.last, number)
        return Culprit(step, Action(Kind.FORWARD, copy, number), loss) if copy in self._copies else None
