"""Layers are divided so that the dearest stage costs least among all ways that are allowed."""

from collections.abc import Iterator
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from stageline.pipeline.model.layer_costs import best_partition, by_weight, can_divide

WEIGHTS = st.lists(st.integers(0, 9), min_size=1, max_size=7)


def all_ways(layers: int, stages: int) -> Iterator[list[int]]:
    """The edges of each."""
    return ([0, *inner, layers] for inner in combinations(range(1, layers), stages - 1))


@given(WEIGHTS, st.integers(1, 7), st.lists(st.integers(0, 30), min_size=7, max_size=7))
def test_it_is_the_best_of_all_ways_in_which_each_stage_has_room(
    weights: list[int], stages: int, room: list[int]
) -> None:
    """Memory is another weight, and each stage has a limit of its own."""
    weight, memory = by_weight(weights), by_weight([3 * each % 10 for each in weights])

    def fits(stage: int, begin: int, end: int) -> bool:
        return (memory(stage, begin, end) or 0) <= room[stage]

    def dearest(edges: list[int]) -> int:
        return max(weight(stage, *part) or 0 for stage, part in enumerate(pairwise(edges)))

    allowed = [
        edges
        for edges in all_ways(len(weights), stages)
        if stages <= len(weights) and all(fits(stage, *part) for stage, part in enumerate(pairwise(edges)))
    ]
    found = best_partition(len(weights), stages, lambda *part: weight(*part) if fits(*part) else None)
    assert can_divide(len(weights), stages, fits) == bool(allowed) == (found is not None)
    if found is not None:
        assert dearest(found) == min(map(dearest, allowed))
        assert found in allowed


def test_a_stage_may_have_to_leave_layers_that_fit_to_the_next_which_has_no_room_for_others() -> None:
    memory = by_weight([0, 0, 3, 0])
    assert can_divide(4, 3, lambda stage, *part: (memory(stage, *part) or 0) <= [0, 0, 3][stage])


def test_a_few_layers_are_divided_evenly() -> None:
    assert best_partition(5, 3, by_weight([5, 1, 1, 1, 4])) == [0, 1, 3, 5]
    assert best_partition(2, 3, by_weight([1, 1])) is None
