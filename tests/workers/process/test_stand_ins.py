"""Which worker takes the place of a lost replica: one that has another, once, and only if nothing else has."""

from typing import Any

import pytest

from stageline.pipeline.schedule import Schedule, make_schedule
from stageline.workers.process.stand_ins import places_to_take

LEASE = 10.0


def line() -> Schedule:
    """Stage 1 has three replicas: on workers 1, 3 and 4."""
    shares = ((1,), (1, 1, 1), (1,))
    return make_schedule("1f1b", [(copy,) for copy in range(5)], 6, shares=shares)


def status(*lost: int, since: float = LEASE, given: bool = False) -> dict[str, Any]:
    """The broker's, of a run that has lost these workers so many seconds ago."""
    return {
        "plan": {"lease": LEASE},
        "workers": [{"index": index, "standing": "missing" if index in lost else "present"} for index in range(5)],
        "recovering": [{"index": index, "since": since, "given": given} for index in lost],
    }


def taken(facts: dict[str, Any], elastic: frozenset[int] = frozenset({1})) -> dict[int, list[int]]:
    """By worker, if it takes any."""
    found = {mine: places_to_take(facts, line(), elastic, mine) for mine in range(5)}
    return {mine: places for mine, places in found.items() if places}


@pytest.mark.parametrize(("lost", "by"), [(1, 3), (3, 1), (4, 1)])
def test_the_first_worker_with_another_replica_takes_the_place(lost: int, by: int) -> None:
    assert taken(status(lost)) == {by: [lost]}


def test_one_worker_takes_all_places_of_those_that_are_lost_together() -> None:
    assert taken(status(1, 3)) == {4: [1, 3]}


def test_a_place_that_was_empty_for_less_than_a_lease_or_is_given_again_is_left() -> None:
    assert taken(status(3, since=LEASE - 0.1)) == {}
    assert taken(status(3, given=True)) == {}


def test_other_stages_and_those_that_are_not_elastic_wait_for_a_replacement() -> None:
    assert taken(status(0)) == taken(status(2)) == {}
    assert taken(status(3), frozenset({0})) == {}


def test_a_worker_takes_no_place_with_a_stage_that_it_has_no_replica_of() -> None:
    shares = ((1, 1), (1, 1))
    schedule = make_schedule("1f1b", [(0, 1), (2,), (3,)], 4, shares=shares)
    facts = {**status(0), "workers": [{"index": index, "standing": "present"} for index in (1, 2)]}
    assert [places_to_take(facts, schedule, frozenset({0, 1}), mine) for mine in (1, 2)] == [[], []]
