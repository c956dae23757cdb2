"""Replicas of a stage send each other sums of gradients at the end of a step, and on the last stage losses.

    replica 0   sum of its microbatches' gradients, in ascending order  ──┐
    replica 1   likewise                                                ──┼── added in the order of replicas, by each
    replica 2   likewise                                                ──┘

All make the same optimizer step with the same total, so their weights stay equal to the bit. That holds as long as
nothing but the update changes their parameters and buffers, such as a count of the microbatches that a layer has seen.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from stageline.pipeline.errors import GradientMismatch
from stageline.pipeline.feature import Compute, Feature
from stageline.pipeline.program import Instruction
from stageline.pipeline.schedule.replicas import Replicas
from stageline.pipeline.stage.layers.memory import copied
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree, describe
from stageline.workers.runtime.losses import ComputeFailed, MicrobatchLoss, StepLosses

_Gradients = Mapping[str, torch.Tensor | None]


class SummedReplicas(Feature):
    """The feature that sends each replica's sums to the others, and updates with the total of all.

    All replicas add in one order.
    """

    name = "replicas"
    only_trains = True

    def __init__(self, replicas: Replicas, losses: StepLosses) -> None:
        """Begin without an open step.

        Args:
            replicas: Copies of all stages, of which this worker has some.
            losses: Losses of the open step on the last stage, which its replicas send along.
        """
        self._replicas = replicas
        self._losses = losses
        self._begun: dict[int, dict[str, tuple[int, int]]] = {}  # weights in the open step, by copy

    def handlers(self, stage: Stage) -> Mapping[str, Compute]:
        """Return the function that computes `A`, the sums to send, on a `stage` with replicas; none on others."""

        def send(operation: Instruction, received: Sequence[Tree]) -> Tree:
            copy, own = operation.action.stage, self._own(stage, operation)
            if self._has_losses(stage):  # a bad microbatch is recorded at the replica that has it
                self._losses.demand_finite(operation.step, self._replicas.groups[copy])
            self._demand_unchanged(stage, copy, operation.step)
            return own.tree

        return {"A": send} if self._replicas.is_replicated(stage.index) else {}

    def around(self, stage: Stage, kind: str, compute: Compute) -> Compute:
        """Return `compute` for a `stage` with replicas.

        An update uses the total of all. A forward notes the variables as they are at the step's beginning.
        """
        if not self._replicas.is_replicated(stage.index) or kind not in ("F", "U"):
            return compute

        def forward(operation: Instruction, received: Sequence[Tree]) -> Tree:
            if operation.action.stage not in self._begun:
                self._begun[operation.action.stage] = changes_of(stage.variables())
            return compute(operation, received)

        def update(operation: Instruction, received: Sequence[Tree]) -> Tree:
            if received:
                self._add(stage, operation, received)
            else:  # the stage is frozen, and sends no sums
                self._demand_unchanged(stage, operation.action.stage, operation.step)
            return compute(operation, ())

        return forward if kind == "F" else update

    def _add(self, stage: Stage, operation: Instruction, received: Sequence[Tree]) -> None:
        copy, own = operation.action.stage, self._own(stage, operation)
        others = [own.other(stage.index, each) for each in received]
        parts = dict(zip(self._replicas.others(copy), others, strict=True)) | {copy: own}
        ordered = [parts[each] for each in self._replicas.of_stage[stage.index]]
        stage.set_gradients(total_of(ordered, own.gradients))
        if self._has_losses(stage):
            self._losses.set(losses_of(ordered))

    def _own(self, stage: Stage, operation: Instruction) -> "ReplicaPart":
        losses = self._losses.of(self._replicas.groups[operation.action.stage]) if self._has_losses(stage) else ()
        return ReplicaPart(stage.gradients(), losses)

    def _has_losses(self, stage: Stage) -> bool:
        return stage.index == self._losses.last

    def _demand_unchanged(self, stage: Stage, copy: int, step: int) -> None:
        """Raise `ComputeFailed` if forwards and backwards have changed a tensor that only updates may change."""
        now = changes_of(stage.variables())
        before = self._begun.pop(copy, now)
        if changed := [name for name in before | now if now.get(name) != before.get(name)]:
            raise ComputeFailed(
                f"stage {stage.index} has changed {', '.join(changed)} while it computed step {step}; its replicas see "
                f"other microbatches, and would come to differ. Use stage.{stage.index}.replicas = 1, or layers "
                "without such buffers"
            )


@dataclass(frozen=True, slots=True)
class ReplicaPart:
    """The sums of one replica at the end of a step.

    Attributes:
        gradients: Sums of the gradients by name; None for a parameter that got none.
        losses: Losses of the replica's microbatches, on the last stage.
    """

    gradients: _Gradients
    losses: tuple[MicrobatchLoss, ...] = ()

    @property
    def tree(self) -> Tree:
        """The sums in the form in which they are sent."""
        return dict(self.gradients), tuple((each.microbatch, each.loss, each.rows) for each in self.losses)

    def other(self, stage: int, given: Tree) -> "ReplicaPart":
        """Return the sums of another replica of stage number `stage`, which has sent `given`.

        Raises `GradientMismatch` if they do not belong to the same parameters.
        """
        match given:
            case (dict() as gradients, tuple() as losses) if gradients.keys() == self.gradients.keys():
                tensors = {
                    name: each for name, each in gradients.items() if each is None or isinstance(each, torch.Tensor)
                }
                found = [_loss(each) for each in losses]
                if len(tensors) == len(gradients) and None not in found:
                    return ReplicaPart(tensors, tuple(each for each in found if each is not None))
        raise GradientMismatch(
            f"stage {stage} got {describe(given)} from another replica; expected a dict of gradients, for "
            f"{', '.join(self.gradients)}, and a tuple of losses"
        )


def total_of(parts: Sequence[ReplicaPart], own: _Gradients) -> dict[str, torch.Tensor | None]:
    """Return the gradients of all replicas, added in their order, on the devices of the replica's `own`.

    They share no memory with the parts.
    """
    return {name: _added([each.gradients[name] for each in parts], own[name]) for name in own}


def losses_of(parts: Iterable[ReplicaPart]) -> list[MicrobatchLoss]:
    """Return the losses of all microbatches, in ascending order."""
    return sorted((each for part in parts for each in part.losses), key=lambda each: each.microbatch)


def changes_of(variables: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Return values, by name, that differ once a tensor has been replaced or written to."""
    return {name: (each.data_ptr(), each._version) for name, each in variables.items()}


def _added(parts: Iterable[torch.Tensor | None], own: torch.Tensor | None) -> torch.Tensor | None:
    there = [each if own is None else each.to(own.device) for each in parts if each is not None]
    if not there:
        return None
    return copied(there[0]) if len(there) == 1 else reduce(torch.add, there)


def _loss(given: Tree) -> MicrobatchLoss | None:
    match given:
        case (int() as microbatch, torch.Tensor() | None as loss, int() as rows):
            return MicrobatchLoss(microbatch, loss, rows)
        case _:
            return None
