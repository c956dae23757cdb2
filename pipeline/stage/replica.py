"""What replicas of a stage send each other at the end of a step: sums of gradients, and on the last stage losses.

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
from stageline.pipeline.tree import Tree, describe

from .layers.memory import copied

_Gradients = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class MicrobatchLoss:
    """A microbatch's loss, weighted by its `rows`: float [], None for one that does not count."""

    microbatch: int
    loss: torch.Tensor | None
    rows: int


@dataclass(frozen=True, slots=True)
class ReplicaSums:
    """What one replica has at the end of a step: the sums of its gradients by name, None for a parameter that got
    none, and on the last stage its microbatches' losses."""

    gradients: _Gradients
    losses: tuple[MicrobatchLoss, ...] = ()

    @property
    def tree(self) -> Tree:
        """As it is sent."""
        return dict(self.gradients), tuple((each.microbatch, each.loss, each.rows) for each in self.losses)

    def other(self, stage: int, given: Tree) -> "ReplicaSums":
        """Those of another replica, which has sent `given`. Raises `GradientMismatch` for what is not of the same
        parameters."""
        match given:
            case (dict() as gradients, tuple() as losses) if gradients.keys() == self.gradients.keys():
                tensors = {
                    name: each for name, each in gradients.items() if each is None or isinstance(each, torch.Tensor)
                }
                found = [_loss(each) for each in losses]
                if len(tensors) == len(gradients) and None not in found:
                    return ReplicaSums(tensors, tuple(each for each in found if each is not None))
        raise GradientMismatch(
            f"stage {stage} got {describe(given)} from another replica; expected a dict of gradients, for "
            f"{', '.join(self.gradients)}, and a tuple of losses"
        )


def total_of(parts: Sequence[ReplicaSums], own: _Gradients) -> dict[str, torch.Tensor | None]:
    """The gradients of all replicas, added in their order, on the devices of the replica's `own`. They share no memory
    with what was added."""
    return {name: _added([each.gradients[name] for each in parts], own[name]) for name in own}


def losses_of(parts: Iterable[ReplicaSums]) -> list[MicrobatchLoss]:
    """Of all microbatches, in ascending order."""
    return sorted((each for part in parts for each in part.losses), key=lambda each: each.microbatch)


def changes_of(variables: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """By name, what differs once a tensor has been replaced or written to."""
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
