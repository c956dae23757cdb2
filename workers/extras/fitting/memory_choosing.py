"""Choice of an option for each stage, so that no worker takes more than its limit, for the least time in all.

Stages are added one by one. A combination so far is kept only if it fits and no other one beats it, in time and in all
that it takes of every worker: whatever comes after, that other one would fit too and be as cheap. So the choice is
exact, for up to four stages that share workers. More stages have too many combinations, and share the same switches.

Bounds on the time of combinations leave most out early: a knapsack's, with a price on memory. At any price of a byte,
take of each stage the option with the least time and price together, less the price of all memory there is: the sum is
no dearer than the best that fits (Lagrangian relaxation: Fisher, Management Science 27, 1981).

If nothing fits, a `Shortfall` names the worker that takes too much, the closest choice, and how much that would need.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from .memory_load import (
    Loads,
    Options,
    StageLoad,
    StageOption,
    Switches,
    WorkerRoom,
    beside,
    fit,
    foreseen_within,
    limit_for,
    reserve_of,
)

_PRICES = (0.0, *(2.0 ** (power / 2) for power in range(-60, 40)))  # nanoseconds for a byte
_ROUNDING = 1.000001  # of sums of floats
MOST_FREE = 4  # stages that share workers, of which each may do something else
# What takes most, and what then helps besides a higher limit.
_PARTS = {
    "stages": ("what its stages hold", "more stages, smaller microbatches, or a schedule with fewer in flight"),
    "working": (
        "what operations, or a snapshot, take for a moment",
        "smaller microbatches, or more stages",
    ),
    "messages": ("messages", "a smaller recovery.snapshot_every, queues.retain_bytes, or smaller microbatches"),
    "snapshots": ("copies for snapshots", "more stages"),
    "offload": ("activations on their way to files and back", "more stages"),
    "model": ("the model as a whole while it is made", "model.weights, from which a worker reads its own stages alone"),
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on the time of combinations.

    `known` is the nanoseconds of a combination that fits, None if none is known. `price` is the price of a byte, in
    nanoseconds, that leaves out most combinations. `room` is how many bytes stages may hold, for each worker with a
    limit.
    """

    known: int | None
    price: float
    room: dict[int, int]

    @classmethod
    def of(cls, stages: Sequence[Options], workers: Sequence[WorkerRoom]) -> "Bounds":
        """Return the bounds for `stages` on `workers`, with the best price of a byte among `_PRICES`."""
        owners = sorted({worker for options in stages for worker in options[0].loads})
        limits = {worker: workers[worker].limit for worker in owners}
        room = {
            worker: foreseen_within(limit) - workers[worker].messages
            for worker, limit in limits.items()
            if limit is not None
        }
        prices = [cls(None, price, room) for price in _PRICES]
        best = max(prices, key=lambda each: each.least(0, {}, stages))
        taken = [[min(options, key=each._priced) for options in stages] for each in prices]
        fitting = [sum(each.nanoseconds for each in one) for one in taken if fit(_loads(one), workers)]
        return cls(min(fitting, default=None), best.price, room)

    def may_be_cheapest(self, nanoseconds: int, loads: Loads, rest: Sequence[Options]) -> bool:
        """Return True if a combination may become the cheapest that fits.

        Args:
            nanoseconds: Time of the combination so far.
            loads: Loads of the combination so far, by worker.
            rest: Options of the stages that the combination does not have yet.
        """
        return self.known is None or self.least(nanoseconds, loads, rest) <= self.known * _ROUNDING + 1

    def least(self, nanoseconds: int, loads: Loads, rest: Sequence[Options]) -> float:
        """Return a lower bound on the nanoseconds of all stages.

        Args:
            nanoseconds: Time of the combination so far.
            loads: Loads of the combination so far, by worker.
            rest: Options of the stages that the combination does not have yet.
        """
        left = sum(room - loads.get(worker, StageLoad()).held for worker, room in self.room.items())
        priced = sum(min(map(self._priced, options)) for options in rest)
        return nanoseconds + priced - self.price * left

    def _priced(self, option: StageOption) -> float:
        held = sum(load.held for worker, load in option.loads.items() if worker in self.room)
        return option.nanoseconds + self.price * held


@dataclass(frozen=True, slots=True)
class _Combination:
    """Combination of options of the first stages: their places among the options of each stage."""

    nanoseconds: int = 0
    places: tuple[int, ...] = ()
    loads: Loads = field(default_factory=dict)

    def with_option(self, place: int, option: StageOption) -> "_Combination":
        loads = beside(self.loads, option.loads)
        return _Combination(self.nanoseconds + option.nanoseconds, (*self.places, place), loads)

    @property
    def order(self) -> tuple[int, tuple[int, ...]]:
        """Sort key: the cheaper combination first; of two as cheap, the one with the earlier options."""
        return self.nanoseconds, self.places

    def beats(self, other: "_Combination") -> bool:
        """Return True if no load is larger than in `other`, which has the same stages and is not earlier in order."""
        return all(load.within(other.loads[worker]) for worker, load in self.loads.items())


def cheapest(stages: Sequence[Options], workers: Sequence[WorkerRoom]) -> tuple[StageOption, ...] | None:
    """Return the option of each stage in the cheapest combination that fits; None if no combination fits.

    Of two combinations that take as long, the one whose options come first is returned.
    """
    found: dict[int, StageOption] = {}
    for members in sharing(stages):
        choose = _cheapest_of if len(members) <= MOST_FREE else _cheapest_alike
        places = choose([stages[stage] for stage in members], workers)
        if places is None:
            return None
        found |= {stage: stages[stage][place] for stage, place in zip(members, places, strict=True)}
    return tuple(found[stage] for stage in range(len(stages)))


def tight_workers(chosen: Iterable[StageOption], workers: Sequence[WorkerRoom]) -> list[int]:
    """Return the workers that keep to their limit only if they return freed memory and wait for snapshots."""
    loads: Loads = reduce(beside, (option.ample for option in chosen), {})
    return [worker for worker, load in sorted(loads.items()) if workers[worker].is_tight(load)]


def sharing(stages: Sequence[Options]) -> list[list[int]]:
    """Return the stages in sets that share workers: the load of a stage matters to the others of its set."""
    found: list[tuple[list[int], set[int]]] = []
    for stage, options in enumerate(stages):
        workers = set(options[0].loads)
        near = [each for each in found if each[1] & workers]
        merged = sorted([stage, *(each for others, _ in near for each in others)])
        found = [each for each in found if each not in near]
        found.append((merged, workers.union(*(others for _, others in near))))
    return sorted(members for members, _ in found)


def _cheapest_of(stages: Sequence[Options], workers: Sequence[WorkerRoom]) -> tuple[int, ...] | None:
    stages = [[_plain(option, workers) for option in options] for options in stages]
    bounds = Bounds.of(stages, workers)
    kept = [_Combination()]
    for number, options in enumerate(stages, 1):
        rest = stages[number:]
        longer = (each.with_option(place, option) for each in kept for place, option in enumerate(options))
        kept = list(
            _unbeaten(
                each
                for each in longer
                if fit(each.loads, workers) and bounds.may_be_cheapest(each.nanoseconds, each.loads, rest)
            )
        )
    return kept[0].places if kept else None


def _cheapest_alike(stages: Sequence[Options], workers: Sequence[WorkerRoom]) -> tuple[int, ...] | None:
    """Return the cheapest options with the same switches for all stages, as far as each stage has them."""
    wishes = dict.fromkeys(option.switches for options in stages for option in options)
    fitting = [each for each in (_alike(stages, wish) for wish in wishes) if fit(each.loads, workers)]
    return min(fitting, key=lambda each: each.order).places if fitting else None


def _alike(stages: Sequence[Options], wish: Switches) -> _Combination:
    found = _Combination()
    for options in stages:
        place = min(range(len(options)), key=lambda each: options[each].switches.unlike(wish))
        found = found.with_option(place, options[place])
    return found


def _plain(option: StageOption, workers: Sequence[WorkerRoom]) -> StageOption:
    """Return an option that takes as much, with fewer distinct sizes, so that more combinations beat others."""
    loads = {
        worker: replace(load, offloaded=min(load.offloaded, workers[worker].under_way))
        for worker, load in option.loads.items()
    }
    return replace(option, loads=loads)


def _unbeaten(combinations: Iterable[_Combination]) -> Iterator[_Combination]:
    """Yield the combinations that no other combination beats, in their order."""
    kept: list[_Combination] = []
    for each in sorted(combinations, key=lambda each: each.order):
        if not any(other.beats(each) for other in kept):
            kept.append(each)
            yield each


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Lack of memory of a worker.

    The `worker` takes `foreseen` bytes at least, with these `switches` of its `stages`, most of them for `part`. Of its
    limit, `reserve` bytes are kept for memory that is not foreseen.
    """

    worker: int
    stages: tuple[int, ...]
    switches: tuple[Switches, ...]
    foreseen: int
    part: str
    reserve: int

    def __str__(self) -> str:
        """Return what is lacking and the way out, for people."""
        by_stage = zip(self.stages, self.switches, strict=True)
        closest = "; ".join(f"stage {stage} with {switches}" for stage, switches in by_stage)
        what, way_out = _PARTS[self.part]
        return (
            f"worker {self.worker} would take {self.foreseen} bytes, most of them for {what}, with the closest choice: "
            f"{closest}; and {self.reserve} bytes of this limit are kept free for what is not estimated (an eighth of "
            f'it, and 16 MiB at least). Use "{-(-limit_for(self.foreseen) // 2**20)}MiB" or more, or {way_out}'
        )


def shortfalls(stages: Sequence[Options], workers: Sequence[WorkerRoom]) -> Iterator[Shortfall]:
    """Yield a shortfall for each set of stages, as in `sharing`, that no combination of options fits."""
    for members in sharing(stages):
        options = [stages[stage] for stage in members]
        if cheapest(options, workers) is None:
            yield _closest(members, [[replace(each, nanoseconds=0) for each in own] for own in options], workers)


def _closest(members: Sequence[int], options: Sequence[Options], workers: Sequence[WorkerRoom]) -> Shortfall:
    """Return the shortfall of the choice that needs least more memory on each worker.

    With one byte less than that on each worker, the limit of some worker is too small.
    """
    low, high = 0, 1
    while cheapest(options, _with_more(workers, high)) is None:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cheapest(options, _with_more(workers, middle)) is None else (low, middle)
    chosen = cheapest(options, _with_more(workers, high)) or ()
    short = _with_more(workers, high - 1)
    loads = {worker: load for worker, load in _loads(chosen).items() if not short[worker].fits(load)}
    worker, load = next(iter(loads.items()))
    room, parts = workers[worker], workers[worker].parts(load)
    own = [place for place, each in enumerate(chosen) if worker in each.loads]
    return Shortfall(
        worker,
        tuple(members[place] for place in own),
        tuple(chosen[place].switches for place in own),
        room.peak(load),
        "model" if room.model > sum(parts.values()) else max(parts, key=lambda name: parts[name]),
        reserve_of(room.limit or 0),
    )


def _with_more(workers: Sequence[WorkerRoom], more: int) -> list[WorkerRoom]:
    return [each if each.limit is None else replace(each, limit=each.limit + more) for each in workers]


def _loads(chosen: Iterable[StageOption]) -> Loads:
    """Return the load of each worker with the options `chosen`."""
    return reduce(beside, (option.loads for option in chosen), {})
