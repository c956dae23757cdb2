"""Gradients clipped by their norm over all stages: norms go down the pipeline, and the total comes up again.

    stage 0  <-- norms-0 --  stage 1  <-- norms-1 --  stage 2      put by 2N and 1N, taken by 1N and 0N
    stage 0  --- clip-1 -->  stage 1  --- clip-2 -->  stage 2      put by 0C and 1C, taken by 1C and 2C

Norms go the way of the last gradients, and the total goes the way of the next step's activations, so neither adds a
trip to the step. docs/decisions/clipping.md says more. Stages below the first that trains take no part.
"""

from collections.abc import Sequence

from .actions.action import Action, Kind
from .actions.shape import Shape


def clip_queues(first_trainable: int, stages: int) -> dict[str, tuple[int, int]]:
    """The queues that carry norms and their total: the stage that puts into each, and the one that takes from it."""
    norms = {f"norms-{stage}": (stage + 1, stage) for stage in range(first_trainable, stages - 1)}
    totals = {f"clip-{stage}": (stage - 1, stage) for stage in range(first_trainable + 1, stages)}
    return norms | totals


def check_clips(shape: Shape, mode: str) -> None:
    """Raises `ScheduleRefused` in asynchronous mode: no moment has the gradients of one step in all stages."""
    if mode == "async":
        raise shape.refused(
            "gradients are clipped by their norm over all stages, and in asynchronous mode each stage updates at a "
            'time of its own; use mode = "sync", or clip no gradients'
        )


def clipping(stages: Sequence[int], first_trainable: int) -> tuple[Action, ...]:
    """What a worker that owns `stages` does before its updates: the norms of its last stage first, then clips, its
    first stage first."""
    trained = sorted(stage for stage in stages if stage >= first_trainable)
    norms = (Action(Kind.NORMS, stage) for stage in reversed(trained))
    return (*norms, *(Action(Kind.CLIP, stage) for stage in trained))
