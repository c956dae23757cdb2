"""Interleaved 1F1B (arXiv 2104.04473): each worker owns several stages, P apart, and takes them in turn.

The stages loop over the workers (worker r of P owns r, P + r, 2P + r, ...), and microbatches run in groups: a worker
forwards a group through its first stage, then through its second, and so on, before it begins the next group.
Two workers with two stages each, groups of two (stage before, microbatch after the letter; B takes twice as long):

    worker 0  0F0 0F1 2F0 2F1 0F2 ... 2B0 === 0F3 2B1 === 2F2 0B0 === 2F3 0B1 === ... 2B2 === ...
    worker 1  ... 1F0 1F1 3F0 3B0 === 3F1 3B1 === 1F2 1B0 === 1F3 1B1 === 3F2 3B2 === 3F3 3B3 ...
"""

from collections.abc import Iterator

from stageline.pipeline.schedule.action import Action, Kind, Lists
from stageline.pipeline.schedule.shape import Shape

from .looped import check_looped


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
