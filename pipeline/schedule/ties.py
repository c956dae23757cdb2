"""Which stages share parameters, and send each other gradients of them: pairs of neighbours among those that do.

a parameter of stages 0, 3 and 5     (0, 3) and (3, 5): a chain, since autograd adds up later uses first
another one, of stages 1 and 3       (0, 1), (1, 3) and (3, 5): gradients of the first pass through stage 1

So a stage has at most one neighbour before it, and one after it. docs/decisions/tied.md says why.
"""

from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from .action import Action, Kind
from .shape import Shape

Ties = tuple[tuple[int, int], ...]  # pairs of stages, the lower one first

_OF_WEIGHTS = (Kind.BACKWARD, Kind.WEIGHT)  # what computes gradients of them


def tied_queues(ties: Ties) -> dict[str, tuple[int, int]]:
    """The queues that join them: the stage that puts into each, and the one that takes from it."""
    gradients = {f"tied-{lower}": (upper, lower) for lower, upper in ties}
    totals = {f"total-{upper}": (lower, upper) for lower, upper in ties}
    return gradients | totals


def check_ties(shape: Shape, mode: str, ties: Ties) -> None:
    """Raises `ScheduleRefused` for ties that cannot be, and in asynchronous mode for any."""
    for lower, upper in ties:
        if not shape.first_trainable <= lower < upper < shape.stages:
            raise shape.refused(
                f"stages {lower} and {upper} cannot share a parameter that is trained: the stages that train are "
                f"{shape.first_trainable} to {shape.stages - 1}"
            )
    if any(len(set(side)) < len(ties) for side in zip(*ties, strict=True)):
        raise shape.refused(f"a stage has two neighbours on one side: {ties}")
    if ties and mode == "async":
        lower, upper = ties[0]
        raise shape.refused(
            f"stages {lower} and {upper} share a parameter, and in asynchronous mode each stage updates at a time of "
            'its own; use mode = "sync", or cut so that one stage has all uses of it'
        )


def with_gradients_sent(actions: Iterable[Action], senders: Collection[int]) -> Iterator[Action]:
    """A worker's `actions`, with a `T` right after each of the `senders` that computes gradients of weights. The
    `senders` are stages that have a neighbour before them."""
    return chain.from_iterable(
        (each, each._replace(kind=Kind.TIED)) if each.kind in _OF_WEIGHTS and each.stage in senders else (each,)
        for each in actions
    )
