"""Microbatches that no layer computes: a mark travels in the place of their activations, None in that of gradients.

    stage      0              1              2 (last)
    forward    mark ────────> mark ────────> its loss does not count
    backward   None <──────── None <──────── None: nothing is added up

A microbatch without rows is left out from the first stage on: a batch with fewer rows than microbatches has some. A bad
one is left out from the stage on that finds it bad (`workers/extras/recording/skipping.py`). Messages keep their
numbers, and no feature of a stage is called: to it, the microbatch does not exist.
"""

from collections.abc import Callable, Sequence
from typing import Any

from stageline.pipeline.feature import Compute
from stageline.pipeline.program import Instruction
from stageline.pipeline.schedule import Kind
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree

from .losses import StepLosses

LEFT_OUT: Tree = {"stageline": "skip"}  # travels in an activation's place


def is_left_out(payload: Tree) -> bool:
    """Return True if `payload` stands for the activations of a microbatch that no layer computes."""
    return isinstance(payload, dict) and payload == LEFT_OUT


class LeftOut:
    """Microbatches of the open steps that stages of one worker leave out."""

    def __init__(self, last: int, losses: StepLosses) -> None:
        """Begin with none.

        Args:
            last: Number of the model's last stage.
            losses: Losses of the open step; of a microbatch that is left out, none counts.
        """
        self._last = last
        self._losses = losses
        self._open: set[tuple[int, int, int]] = set()  # copy, step, microbatch: forward, and not yet backward

    def begin(self, instruction: Instruction) -> Tree:
        """Leave the microbatch of a training step's forward out, its backward, too; return what the next stage gets."""
        self._open.add(_place(instruction))
        return LEFT_OUT

    def around(self, stage: Stage, kind: str, compute: Compute, is_empty: Callable[[Instruction], bool]) -> Compute:
        """Return `compute`, which is not called for microbatches that are left out.

        Args:
            stage: Stage that computes.
            kind: Kind of its operations.
            compute: Computes an operation.
            is_empty: Returns True for a forward of the first stage whose microbatch has no rows.
        """

        def forward(instruction: Instruction, received: Sequence[Any]) -> Tree:
            if not (any(map(is_left_out, received)) or (stage.index == 0 and is_empty(instruction))):
                return compute(instruction, received)
            if instruction.evaluates:
                return LEFT_OUT
            if stage.index == self._last:
                self._losses.add(None, 0)
            return self.begin(instruction)

        def backward(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            if not self._open or (place := _place(instruction)) not in self._open:
                return compute(instruction, received)
            if kind != Kind.INPUT:  # its second half is to come
                self._open.remove(place)
            stage.backward(None, step=place[1], microbatch=place[2])  # drops what the forward may have stashed
            return None

        match kind:
            case Kind.FORWARD:
                return forward
            case Kind.BACKWARD | Kind.INPUT | Kind.WEIGHT:
                return backward
        return compute


def _place(instruction: Instruction) -> tuple[int, int, int]:
    action = instruction.op.action
    return action.stage, instruction.step, action.microbatch
