"""What replicas of a stage send each other at the end of a step: sums of gradients, and on the last stage losses.

    replica 0   sum of its microbatches' gradients, in ascending order  ──┐
    replica 1   likewise                                                ──┼── added in the order of replicas, by each
    replica 2   likewise                                                ──┘

All make the same optimizer step with the same total, so their weights stay equal to the bit.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import torch

from stageline.pipeline.errors import GradientMismatch
from stageline.pipeline.tree import Tree, describe

from .memory import copied

_Gradients = Mapping[str, torch.Tensor | None]


def total_of(stage: int, own: _Gradients, sums: Sequence[Tree]) -> dict[str, torch.Tensor | None]:
    """The gradients of all replicas of `stage`, added in their order. `sums` has those of each, of which one are its
    `own`: by name, with None for what got none. What is returned shares no memory with them. Raises `GradientMismatch`
    for what is not of the same parameters."""
    checked = [_checked(stage, own, each) for each in sums]
    return {name: _added([each[name] for each in checked], own[name]) for name in own}


def _added(parts: Iterable[torch.Tensor | None], own: torch.Tensor | None) -> torch.Tensor | None:
    there = [each if own is None else each.to(own.device) for each in parts if each is not None]
    if not there:
        return None
    return copied(there[0]) if len(there) == 1 else reduce(torch.add, there)


def _checked(stage: int, own: _Gradients, given: Tree) -> _Gradients:
    if not isinstance(given, dict) or given.keys() != own.keys():
        raise GradientMismatch(
            f"stage {stage} got {describe(given)} from another replica; wanted is a dict of gradients, for "
            f"{', '.join(own)}"
        )
    return given
