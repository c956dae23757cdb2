"""Cuts of a model by the costs of its layers, so that stages are balanced and have room in memory.

weights 5 1 1 1 4, 3 stages:   5 | 1 1 | 1 4      edges [0, 1, 3, 5]

Memory of a layer is given by names and numbers, since two layers of one stage may share it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, takewhile

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.plan.errors import Setting
from stageline.pipeline.plan.keys.training import Balance

Cost = Callable[[int, int, int], int | None]  # (stage, first layer, end) -> cost; None: not allowed
_Found = tuple[int, list[int]]  # the dearest stage's cost, and the edges


InFlight = Callable[[int], Sequence[int] | None]  # number of stages -> most microbatches that each holds


def best_partition(layers: int, stages: int, cost: Cost) -> list[int] | None:
    """Return the edges of `stages` parts of which the dearest costs least; None if no partition is allowed.

    The choice among several such partitions is always the same.

    Args:
        layers: Number of layers.
        stages: Number of parts.
        cost: Cost of a stage with a range of layers; None if the range is not allowed.
    """
    best: dict[int, _Found] = {0: (0, [0])}
    for stage in range(stages):
        last = stage == stages - 1
        ends = [layers] if last else range(stage + 1, layers)
        found = ((end, _best_before(best, stage, end, cost)) for end in ends)
        best = {end: each for end, each in found if each is not None}
    return best[layers][1] if layers in best else None


def _best_before(best: dict[int, _Found], stage: int, end: int, cost: Cost) -> _Found | None:
    """Return the best way to divide the layers before `end` into one more stage than `best` does."""
    ways = (
        (max(before, own), [*edges, end])
        for begin, (before, edges) in best.items()
        if begin < end
        for own in [cost(stage, begin, end)]
        if own is not None
    )
    return min(ways, default=None)


def can_divide(layers: int, stages: int, fits: Callable[[int, int, int], bool]) -> bool:
    """Return True if the layers can be divided into `stages` parts that all fit.

    Args:
        layers: Number of layers.
        stages: Number of parts.
        fits: Called with a stage and the edges of its layers. A part of a range that fits in a stage must fit in it
            too.
    """
    ends = {0}
    for stage in range(stages):
        most = layers - (stages - stage - 1)
        ends = {end for begin in ends for end in _fitting(begin, most, partial(fits, stage, begin))}
    return layers in ends


def _fitting(begin: int, most: int, fits: Callable[[int], bool]) -> Iterator[int]:
    """Yield the ends of the parts that begin at `begin` and fit."""
    return takewhile(fits, range(begin + 1, most + 1))


def by_weight(weights: Sequence[int]) -> Cost:
    """Return the cost function of stages whose layers cost `weights`."""
    before = [0, *accumulate(weights)]
    return lambda stage, begin, end: before[end] - before[begin]


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The costs of one layer.

    Attributes:
        parameters: Number of parameters.
        nanoseconds: Time of the layer's forward and backward of a microbatch.
        held: Bytes held all the time, by name: weights, gradients and the optimizer's state.
        trained: Bytes, among those held, that asynchronous mode keeps in versions, by name.
        saved: Bytes that one microbatch saves for backward, by number of memory.
        output: Bytes of the layer's output, by number of memory.
    """

    parameters: int
    nanoseconds: int
    held: Mapping[str, int] = field(default_factory=dict)
    trained: Mapping[str, int] = field(default_factory=dict)
    saved: Mapping[int, int] = field(default_factory=dict)
    output: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CutWish:
    """The wishes for a cut.

    Attributes:
        stages: Number of stages.
        balance: The cost that is balanced.
        limit: Bytes that a stage may take; None for any number.
        stashes: True in asynchronous mode with a version of the weights for each microbatch in flight.
        delays: True with one version of the weights besides the newest.
    """

    stages: int
    balance: Balance = "parameters"
    limit: int | None = None
    stashes: bool = False
    delays: bool = False


def chosen_edges(costs: Sequence[LayerCost], wish: CutWish, in_flight: InFlight) -> list[int]:
    """Return the number of each stage's first layer and, at the end, the number of layers, for the best cut that fits.

    Args:
        costs: Costs of the layers.
        wish: The wishes for the cut.
        in_flight: Returns, for a number of stages, the most microbatches that each stage holds; None if the schedule is
            not for this number.

    Raises:
        ModelRefused: No cut fits; the error has the memory that the stages would take at least.
    """
    if not 0 < wish.stages <= len(costs):
        raise ModelRefused(
            Setting("model.stages", wish.stages), f", but the model has {len(costs)} layers: at most one each"
        )
    weights = [_weight(cost, wish.balance) for cost in costs]
    of_weight, limit = by_weight(weights), wish.limit
    if limit is None:
        return best_partition(len(costs), wish.stages, of_weight) or []
    taken = _memory(costs, wish, in_flight)

    def cost(stage: int, begin: int, end: int) -> int | None:
        return of_weight(stage, begin, end) if (taken(stage, begin, end) or 0) <= limit else None

    edges = best_partition(len(costs), wish.stages, cost)
    if edges is None:
        raise ModelRefused(_refusal(costs, wish, in_flight, limit))
    return edges


def _weight(cost: LayerCost, balance: Balance) -> int:
    """Return one more than the cost of a layer, so that layers that cost nothing are spread too."""
    return 1 + (cost.nanoseconds if balance == "time" else cost.parameters)


def _memory(costs: Sequence[LayerCost], wish: CutWish, in_flight: InFlight) -> Cost:
    """Return the function of the bytes that a stage takes, counted as a plan's estimate counts them."""
    peaks = in_flight(wish.stages) or [1] * wish.stages
    ranges = LayerRanges(costs)
    stashed = [peak * wish.stashes for peak in peaks[: wish.stages - 1]]
    versions = [1] * wish.stages if wish.delays else [*stashed, 0]  # besides the newest

    def taken(stage: int, begin: int, end: int) -> int:
        held, trained, saved = ranges.bytes(begin, end)
        return held + saved * peaks[stage] + trained * versions[stage]

    return taken


class LayerRanges:
    """The memory that ranges of layers hold, computed once for each first layer that is asked for."""

    def __init__(self, costs: Sequence[LayerCost]) -> None:
        """Make the ranges of the layers with these costs."""
        self._costs = costs
        self._known: dict[int, list[tuple[int, int, int]]] = {}

    def bytes(self, begin: int, end: int) -> tuple[int, int, int]:
        """Return the bytes of the layers from `begin` up to `end`.

        Returns:
            Bytes of all weights with what belongs to them, of the trained among these, and of a microbatch's
            activations.
        """
        if begin not in self._known:
            self._known[begin] = self._from(begin)
        return self._known[begin][end - begin - 1]

    def _from(self, begin: int) -> list[tuple[int, int, int]]:
        held: dict[str, int] = {}
        trained: dict[str, int] = {}
        saved: dict[int, int] = {}
        found, sums = [], [0, 0, 0]
        for cost in self._costs[begin:]:
            for place, (known, more) in enumerate(((held, cost.held), (trained, cost.trained), (saved, cost.saved))):
                sums[place] += _added(known, more)  # type: ignore[arg-type]
            leaves = sum(size for number, size in cost.output.items() if number not in saved)
            found.append((sums[0], sums[1], sums[2] + leaves))
        return found


def _added(known: dict[object, int], more: Mapping[object, int]) -> int:
    """Add to `known` the entries of `more` that it lacks, and return their bytes."""
    new = {key: size for key, size in more.items() if key not in known}
    known.update(new)
    return sum(new.values())


def _refusal(costs: Sequence[LayerCost], wish: CutWish, in_flight: InFlight, limit: int) -> str:
    taken = _memory(costs, wish, in_flight)
    edges = best_partition(len(costs), wish.stages, taken) or []
    sizes = [taken(stage, *edges[stage : stage + 2]) or 0 for stage in range(wish.stages)]
    largest = max(range(wish.stages), key=sizes.__getitem__)
    layers = range(len(costs) + 1)[edges[largest] : edges[largest + 1]]
    more = _stages_that_fit(costs, wish, in_flight, limit)
    way_out = "no other number of stages fits" if more is None else f"model.stages = {more} would fit"
    return (
        f"model.stage_memory = {limit} bytes: no cut into {wish.stages} stages fits. With the best, model.cut = "
        f"{edges[1:-1]}, the stages take {', '.join(map(str, sizes))} bytes; stage {largest}, of layers "
        f"{layers[0]} to {layers[-1]}, takes most. At least {max(sizes)} is needed; {way_out}"
    )


def _stages_that_fit(costs: Sequence[LayerCost], wish: CutWish, in_flight: InFlight, limit: int) -> int | None:
    """Return the next larger number of stages that fits, or else the next smaller one.

    Returns None if there is none, or the schedule is for the wished number alone.
    """
    numbers = (*range(wish.stages + 1, len(costs) + 1), *range(wish.stages - 1, 0, -1))
    return next((stages for stages in numbers if _fit(costs, stages, wish, in_flight, limit)), None)


def _fit(costs: Sequence[LayerCost], stages: int, wish: CutWish, in_flight: InFlight, limit: int) -> bool:
    if in_flight(stages) is None:
        return False
    taken = _memory(costs, replace(wish, stages=stages, limit=limit), in_flight)
    return can_divide(len(costs), stages, lambda *part: (taken(*part) or 0) <= limit)
