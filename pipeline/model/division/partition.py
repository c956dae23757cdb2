"""Divides a row of layers into stages, so that the dearest stage costs as little as can be, and each is allowed.

weights 5 1 1 1 4, 3 stages:   5 | 1 1 | 1 4      edges [0, 1, 3, 5]
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, takewhile

Cost = Callable[[int, int, int], int | None]  # of a stage with the layers from one up to another; None: not allowed
_Found = tuple[int, list[int]]  # the dearest stage's cost, and the edges


def best_partition(layers: int, stages: int, cost: Cost) -> list[int] | None:
    """The edges of `stages` parts of which the dearest costs least; of several such, always the same. None if there are
    none that are allowed."""
    best: dict[int, _Found] = {0: (0, [0])}
    for stage in range(stages):
        last = stage == stages - 1
        ends = [layers] if last else range(stage + 1, layers)
        found = ((end, _best_before(best, stage, end, cost)) for end in ends)
        best = {end: each for end, each in found if each is not None}
    return best[layers][1] if layers in best else None


def _best_before(best: dict[int, _Found], stage: int, end: int, cost: Cost) -> _Found | None:
    """The best way to divide the layers before `end` into one more stage than `best` does."""
    ways = (
        (max(before, own), [*edges, end])
        for begin, (before, edges) in best.items()
        if begin < end
        for own in [cost(stage, begin, end)]
        if own is not None
    )
    return min(ways, default=None)


def can_divide(layers: int, stages: int, fits: Callable[[int, int, int], bool]) -> bool:
    """Whether there are `stages` parts that all fit. A part of what fits in a stage fits in it, too."""
    ends = {0}
    for stage in range(stages):
        most = layers - (stages - stage - 1)
        ends = {end for begin in ends for end in _fitting(begin, most, partial(fits, stage, begin))}
    return layers in ends


def _fitting(begin: int, most: int, fits: Callable[[int], bool]) -> Iterator[int]:
    """Where a part from `begin` on that fits can end."""
    return takewhile(fits, range(begin + 1, most + 1))


def by_weight(weights: Sequence[int]) -> Cost:
    """What a stage costs whose layers cost `weights`."""
    before = [0, *accumulate(weights)]
    return lambda stage, begin, end: before[end] - before[begin]
