"""Interleaved 1F1B (arXiv 2104.04473): each worker owns several stages, P apart, and takes them in turn.

The stages loop over the workers (worker r of P owns r, P + r, 2P + r, ...), and microbatches go round in groups: a
worker forwards a group through its first stage, then through its second, and so on, before it begins the next group.
"""

from collections.abc import Iterator

from .action import Action, Kind


def group_of(workers: int, microbatches: int) -> int | None:
    """How many microbatches go round together, or None where they do not divide into groups that have no deadlock."""
    rounds = max(1, microbatches // workers)
    return microbatches // rounds if microbatches % rounds == 0 else None


def nearest(workers: int, microbatches: int) -> list[int]:
    """The numbers of microbatches next to `microbatches`, below and above, that do divide into groups."""
    below = next((number for number in range(microbatches - 1, 0, -1) if group_of(workers, number)), None)
    above = next(
        number for number in range(microbatches + 1, 2 * microbatches + workers + 1) if group_of(workers, number)
    )
    return [above] if below is None else [below, above]


def interleave(worker: int, workers: int, turns: int, microbatches: int, group: int) -> Iterator[Action]:
    """One step of `worker`, its updates left out, if each of `workers` owns `turns` stages."""

    def action(kind: Kind, place: int) -> Action:
        turn = place // group % turns
        stage = (turn if kind is Kind.FORWARD else turns - 1 - turn) * workers + worker
        return Action(kind, stage, place // (group * turns) * group + place % group)

    places = microbatches * turns
    warm_up = min(places, (turns - 1) * group + 2 * (workers - 1 - worker))
    for place in range(places):
        yield action(Kind.FORWARD, place)
        if place >= warm_up:
            yield action(Kind.BACKWARD, place - warm_up)
    for place in range(places - warm_up, places):
        yield action(Kind.BACKWARD, place)
