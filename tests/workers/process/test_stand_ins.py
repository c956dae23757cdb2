"""Which worker takes the place of a lost replica: one that has another, once, and only if nothing else has."""

import contextlib
import threading
from typing import Any

import pytest

from stageline.pipeline.schedule import Schedule, make_schedule
from stageline.workers.process import stand_ins
from stageline.workers.process.stand_ins import StandIns, places_to_take
from support.small_plans import plan

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


def test_the_address_of_the_broker_is_in_the_environment_of_a_stand_in_and_on_no_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    taken = threading.Event()

    class Started:
        def __init__(
            self, module: str, arguments: list[str], keep: list[int], *, env: dict[str, str], cwd: str
        ) -> None:
            started.append((arguments, env))
            taken.set()

        def poll(self) -> None:
            """It runs."""

        def wait(self, timeout: float) -> int:
            return 0

    class Asked(contextlib.nullcontext[Any]):
        def __init__(self, url: str, pair: object) -> None:
            super().__init__(self)

        def ask(self, what: str) -> dict[str, Any]:
            return status(3)

    monkeypatch.setattr(stand_ins, "Interpreter", Started)
    monkeypatch.setattr(stand_ins, "Client", Asked)
    monkeypatch.setattr(stand_ins, "EVERY", 0.01)
    address = "redis://:secret@host/1#line#k1.of-the-broker"
    elastic = plan(model__cut=[2, 4], schedule__microbatches=6, stage={"1": {"replicas": 3, "elastic": True}})
    with StandIns(line(), elastic, 1, (address, None), ("worker", "plan.toml")):
        assert taken.wait(30)
    ((arguments, environment),) = started
    assert arguments[:4] == ["worker", "plan.toml", "--index", "3"]
    assert not [each for each in arguments if "secret" in each or "#k1" in each]
    assert environment["STAGELINE_JOIN"] == address
