"""Takes for each stage one of its options, so that no worker takes more than its limit, for the least time in all.

Stages are added one by one, and of the combinations so far only those are kept that fit, and that no other one beats in
time and in all that it takes of every worker: whatever comes after, that one would fit too and be as cheap. So the
choice is exact, for up to four stages that share workers. There are too many combinations of more; these do the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from .bounds import Bounds
from .load import Loads, Options, StageOption, Switches, WorkerRoom, beside, fit

MOST_FREE = 4  # stages that share workers, of which each may do something else


@dataclass(frozen=True, slots=True)
class _Combination:
    """Options of the first stages: their places among those of each stage."""

    nanoseconds: int = 0
    places: tuple[int, ...] = ()
    loads: Loads = field(default_factory=dict)

    def with_option(self, place: int, option: StageOption) -> "_Combination":
        loads = beside(self.loads, option.loads)
        return _Combination(self.nanoseconds + option.nanoseconds, (*self.places, place), loads)

    @property
    def order(self) -> tuple[int, tuple[int, ...]]:
        """The cheaper first; of two as cheap, that with the earlier options."""
        return self.nanoseconds, self.places

    def beats(self, other: "_Combination") -> bool:
        """Of the same stages, and not later in order."""
        return all(load.within(other.loads[worker]) for worker, load in self.loads.items())


def cheapest(stages: Sequence[Options], workers: Sequence[WorkerRoom]) -> tuple[StageOption, ...] | None:
    """For each stage one of its options; None if no combination fits. Of two that take as long, the one whose options
    come first."""
    found: dict[int, StageOption] = {}
    for group in sharing(stages):
        choose = _cheapest_of if len(group) <= MOST_FREE else _cheapest_alike
        places = choose([stages[stage] for stage in group], workers)
        if places is None:
            return None
        found |= {stage: stages[stage][place] for stage, place in zip(group, places, strict=True)}
    return tuple(found[stage] for stage in range(len(stages)))


def tight_workers(chosen: Iterable[StageOption], workers: Sequence[WorkerRoom]) -> list[int]:
    """Those that keep to their limit only if they give back what they free, and wait for their snapshots."""
    nothing: Loads = {}
    loads = reduce(beside, (option.ample for option in chosen), nothing)
    return [worker for worker, load in sorted(loads.items()) if workers[worker].is_tight(load)]


def sharing(stages: Sequence[Options]) -> list[list[int]]:
    """The stages in groups: what one of a group takes matters to the others of it, which are on the same workers."""
    groups: list[tuple[list[int], set[int]]] = []
    for stage, options in enumerate(stages):
        workers = set(options[0].loads)
        near = [group for group in groups if group[1] & workers]
        merged = sorted([stage, *(each for group, _ in near for each in group)])
        groups = [group for group in groups if group not in near]
        groups.append((merged, workers.union(*(others for _, others in near))))
    return sorted(group for group, _ in groups)


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
    """Where all stages do the same, as far as they may."""
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
    """As large, with fewer sizes, by which more combinations beat others."""
    loads = {
        worker: replace(load, offloaded=min(load.offloaded, workers[worker].under_way))
        for worker, load in option.loads.items()
    }
    return replace(option, loads=loads)


def _unbeaten(combinations: Iterable[_Combination]) -> Iterator[_Combination]:
    """In their order."""
    kept: list[_Combination] = []
    for each in sorted(combinations, key=lambda each: each.order):
        if not any(other.beats(each) for other in kept):
            kept.append(each)
            yield each
