"""Which stages share parameters, and send each other gradients of them: pairs of neighbours among those that do.

a parameter of stages 0, 3 and 5     (0, 3) and (3, 5): a chain, since autograd adds up later uses first
another one, of stages 1 and 3       (0, 1), (1, 3) and (3, 5): gradients of the first pass through stage 1

So a stage has at most one neighbour before it, and one after it. docs/decisions/tied.md says why.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal

from .actions.action import Action, Kind
from .actions.shape import Shape

Ties = tuple[tuple[int, int], ...]  # pairs of stages, the lower one first
Tied = Literal["microbatch", "step"]  # after what gradients are sent

_GRADIENTS = {"microbatch": "tied", "step": "subtotal"}


def tied_queues(ties: Ties, tied: Tied) -> dict[str, tuple[int, int]]:
    """The queues that join them: the stage that puts into each, and the one that takes from it."""
    gradients = {f"{_GRADIENTS[tied]}-{lower}": (upper, lower) for lower, upper in ties}
    totals = {f"total-{upper}": (lower, upper) for lower, upper in ties}
    return gradients | totals


def check_ties(shape: Shape, mode: str, ties: Ties, tied: str) -> None:
    """Raises `ScheduleRefused` for ties that cannot be, and in asynchronous mode for any."""
    if tied not in _GRADIENTS:
        raise shape.refused(f'stages cannot send what they share per {tied!r}; use tied = "microbatch" or "step"')
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


def with_gradients_sent(actions: Iterable[Action], ties: Ties, tied: Tied) -> Sequence[Action]:
    """A worker's `actions`, without updates, and those that send gradients of shared parameters. Per microbatch it is a
    `T` right after each backward of stages that have a neighbour before them, which do not split theirs: the neighbour
    would wait for gradients that may be deferred. Per step it is an `S` of each stage that has a neighbour: at the end,
    the last stage first."""
    if tied == "microbatch":
        senders = {upper for _, upper in ties}
        return tuple(chain.from_iterable(_with_sending(each) if each.stage in senders else (each,) for each in actions))
    listed, sharing = tuple(actions), {*chain.from_iterable(ties)}
    stages = sorted({each.stage for each in listed} & sharing, reverse=True)
    return (*listed, *(Action(Kind.SUBTOTAL, stage) for stage in stages))


def _with_sending(action: Action) -> tuple[Action, ...]:
    match action.kind:
        case Kind.BACKWARD | Kind.INPUT:
            return action._replace(kind=Kind.BACKWARD), action._replace(kind=Kind.TIED)
        case Kind.WEIGHT:
            return ()
        case _:
            return (action,)
