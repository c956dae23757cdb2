"""Interleaved 1F1B (arXiv 2104.04473): each worker owns several stages, P apart, and takes them in turn.

The stages loop over the workers (worker r of P owns r, P + r, 2P + r, ...), and microbatches run in groups: a worker
forwards a group through its first stage, then through its second, and so on, before it begins the next group.
Two workers with two stages each, groups of two (stage before, microbatch after the letter; B takes twice as long):

    worker 0  0F0 0F1 2F0 2F1 0F2 ... 2B0 === 0F3 2B1 === 2F2 0B0 === 2F3 0B1 === ... 2B2 === ...
    worker 1  ... 1F0 1F1 3F0 3B0 === 3F1 3B1 === 1F2 1B0 === 1F3 1B1 === 3F2 3B2 === 3F3 3B3 ...

**Breadth first** (arXiv 2211.05953): each worker runs all microbatches through one of its stages before it turns to the
next. A stage is so in use once in a forward pass and once in a backward pass, in one piece: right where other weights
are elsewhere meanwhile. It has the bubble of interleaved 1F1B, (P - 1)(F + B) / V with V stages a worker and F
and B the times of a worker, and the memory of GPipe. Backwards are in ascending order of microbatches, as everywhere
here; the paper's bubble does not depend on it. Two workers with two stages each (B takes twice as long):

    worker 0  0F0 0F1 2F0 2F1 ... ... ... 2B0 === 2B1 === 0B0 === 0B1 ===
    worker 1  ... 1F0 1F1 3F0 3F1 3B0 === 3B1 === 1B0 === 1B1 ===
"""

from collections.abc import Iterator

from .action import Action, Kind, Lists
from .shape import Shape


def check_looped(shape: Shape) -> None:
    """Raises `ScheduleRefused` unless the stages loop over the workers."""
    placement = [sorted(stages) for stages in shape.placement]
    looped = [list(range(worker, shape.stages, shape.workers)) for worker in range(shape.workers)]
    multiple = shape.stages % shape.workers == 0
    if not multiple or placement != looped:
        way_out = f"place the stages as {looped}" if multiple else f"use a multiple of {shape.workers} stages"
        raise shape.refused(
            f"its stages must loop over the workers (worker r of P owns r, P + r, ...); {way_out}, or use 1f1b"
        )


def interleaved(shape: Shape) -> Lists:
    """Each worker's list for one step, without updates. Raises `ScheduleRefused` if stages or groups do not fit."""
    check_looped(shape)
    group = _group(shape.workers, shape.microbatches)
    if group is None:
        raise shape.refused(_not_in_groups(shape))
    return tuple(
        tuple(action for action in actions if action.kind is Kind.FORWARD or action.stage >= shape.first_trainable)
        for actions in (_worker(shape, worker, group) for worker in range(shape.workers))
    )


def _worker(shape: Shape, worker: int, group: int) -> Iterator[Action]:
    turns = shape.stages // shape.workers
    places = turns * shape.microbatches
    warm_up = min(places, (turns - 1) * group + 2 * (shape.workers - 1 - worker))

    def action(kind: Kind, place: int) -> Action:
        turn = place // group % turns
        stage = (turn if kind is Kind.FORWARD else turns - 1 - turn) * shape.workers + worker
        return Action(kind, stage, place // (group * turns) * group + place % group)

    for place in range(places):
        yield action(Kind.FORWARD, place)
        if place >= warm_up:
            yield action(Kind.BACKWARD, place - warm_up)
    for place in range(places - warm_up, places):
        yield action(Kind.BACKWARD, place)


def _group(workers: int, microbatches: int) -> int | None:
    """The number of microbatches in a group; None if the step does not divide into groups."""
    rounds = max(1, microbatches // workers)
    return microbatches // rounds if microbatches % rounds == 0 else None


def _not_in_groups(shape: Shape) -> str:
    workers, microbatches = shape.workers, shape.microbatches
    below = next(number for number in range(microbatches - 1, 0, -1) if _group(workers, number))
    above = next(number for number in range(microbatches + 1, microbatches + workers + 1) if _group(workers, number))
    return (
        f"the microbatches do not divide into {microbatches // workers} equal groups; "
        f"the nearest numbers that work on {workers} workers are {below} and {above}"
    )


def breadth_first(shape: Shape) -> Lists:
    """Each worker's list for one step, without updates. Raises `ScheduleRefused` if the stages do not loop."""
    check_looped(shape)
    return tuple(_fills_and_drains(shape, sorted(stages)) for stages in shape.placement)


def _fills_and_drains(shape: Shape, stages: list[int]) -> tuple[Action, ...]:
    numbers = range(shape.microbatches)
    trained = [stage for stage in reversed(stages) if stage >= shape.first_trainable]
    return (
        *(Action(Kind.FORWARD, stage, number) for stage in stages for number in numbers),
        *(Action(Kind.BACKWARD, stage, number) for stage in trained for number in numbers),
    )
