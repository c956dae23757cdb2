"""Looped breadth-first (arXiv 2211.05953): each worker owns several stages, P apart, and runs all microbatches through
one of them before it turns to the next.

A stage is so in use once in a forward pass and once in a backward pass, in one piece: right where the weights of the
others are elsewhere meanwhile. It has the bubble of interleaved 1F1B, (P - 1)(F + B) / V with V stages a worker and F
and B the times of a worker, and the memory of GPipe. Backwards are in ascending order of microbatches, as everywhere
here; the paper's bubble does not depend on it. Two workers with two stages each (B takes twice as long):

    worker 0  0F0 0F1 2F0 2F1 ... ... ... 2B0 === 2B1 === 0B0 === 0B1 ===
    worker 1  ... 1F0 1F1 3F0 3F1 3B0 === 3B1 === 1B0 === 1B1 ===
"""

from stageline.pipeline.schedule.action import Action, Kind, Lists
from stageline.pipeline.schedule.shape import Shape

from .looped import check_looped


def breadth_first(shape: Shape) -> Lists:
    """Each worker's list for one step, without updates. Raises `ScheduleRefused` if the stages do not loop."""
    check_looped(shape)
    return tuple(_worker(shape, sorted(stages)) for stages in shape.placement)


def _worker(shape: Shape, stages: list[int]) -> tuple[Action, ...]:
    numbers = range(shape.microbatches)
    trained = [stage for stage in reversed(stages) if stage >= shape.first_trainable]
    return (
        *(Action(Kind.FORWARD, stage, number) for stage in stages for number in numbers),
        *(Action(Kind.BACKWARD, stage, number) for stage in trained for number in numbers),
    )
