"""Gradients clipped by their norm over all stages: `N` gathers norms, `C` clips by the total."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stageline.pipeline.feature import Compute, Feature, Operation
from stageline.pipeline.tree import Tree


class ClippedGradients(Feature):
    """Computes the norms and the clips of stages that have a `clip_norm`.

    Args:
        last: Number of the last stage.
        loss: Gives the loss of a step there, or raises: a bad microbatch is named before its gradients are.
    """

    name = "clipping"

    def __init__(self, last: int, loss: Callable[[int], float | None]) -> None:
        self._last = last
        self._loss = loss

    def handlers(self, stage: Any) -> Mapping[str, Compute]:
        def norms(operation: Operation, received: Sequence[Tree]) -> Tree:
            if stage.index == self._last:
                self._loss(operation.step)
            found: Tree = stage.norms(*received)
            return found

        return {"N": norms, "C": lambda operation, received: stage.clip(*received)}
