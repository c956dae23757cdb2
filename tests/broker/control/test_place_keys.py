"""Which process has the key of which queue."""

from collections.abc import Sequence
from itertools import product

import pytest

from stageline.broker.control.place_keys import PlaceKeys
from stageline.broker.control.protocol import RunKeys
from stageline.pipeline.program import (
    Evaluation,
    NormClipping,
    Pass,
    Queue,
    Replays,
    ScriptCalls,
    SumExchange,
    TiedStages,
    compile_program,
)
from stageline.pipeline.schedule import Schedule, make_schedule
from support.programs import queue_named
from support.shapes import line

KEYS = RunKeys("run-1", b"k" * 32)
PLAIN = make_schedule("1f1b", line(3), 4)
FROZEN = make_schedule("1f1b", line(3), 4, first_trainable=1)
REPLICATED = make_schedule("1f1b", ((0,), (1,), (2,), (3,)), 4, shares=((1,), (1, 1), (1,)))
PROGRAMS: list[tuple[Schedule, list[Pass]]] = [
    (PLAIN, [TiedStages(((0, 2),)), NormClipping(), Evaluation(is_told=True), ScriptCalls()]),
    (PLAIN, [TiedStages(((0, 2),), "step")]),
    (FROZEN, [Replays(3)]),
    (REPLICATED, [SumExchange(), *ScriptCalls.with_evaluation()]),
]
OF_A_FEATURE = Queue(name="gradnorms-0", producer=1, consumer=0)  # a user's


def keys_of(place: int, places: int, generation: int = 0) -> PlaceKeys:
    links = [KEYS.of_link(place, other, generation) if other != place else b"" for other in range(places)]
    return PlaceKeys(place, tuple(links))


@pytest.mark.parametrize(("schedule", "passes"), PROGRAMS)
def test_every_queue_has_a_key_of_its_own_which_its_two_places_have(schedule: Schedule, passes: Sequence[Pass]) -> None:
    queues = [*compile_program(schedule, passes).queues.values(), OF_A_FEATURE]
    places = len(schedule.placement) + 1  # the script's
    known: dict[str, bytes] = {}
    for queue in queues:
        if queue.is_local:
            continue
        ends = {keys_of(place, places).of_queue(queue) for place in (queue.producer, queue.consumer)}
        assert len(ends) == 1, queue.name
        known[queue.name] = ends.pop()
    assert len(set(known.values())) == len(known)
    assert {len(key) for key in known.values()} == {32}
    for place in range(places):
        mine = {each.name for each in queues if place in (each.producer, each.consumer) and not each.is_local}
        assert keys_of(place, places).of_requests(queues) == {name: known[name] for name in mine}


def test_no_place_has_the_key_of_a_queue_between_others() -> None:
    for queue in (queue_named("forward-1"), Queue(name="loss", producer=2, consumer=2)):
        with pytest.raises(ValueError, match=f"place 2 has no key of {queue.name}"):
            keys_of(2, 3).of_queue(queue)


def test_a_queue_of_the_same_name_in_another_direction_run_or_generation_has_another_key() -> None:
    one, back = queue_named("forward-1"), Queue(name="forward-1", producer=1, consumer=0)
    keys = {keys_of(0, 2, generation).of_queue(queue) for generation, queue in product((0, 1), (one, back))}
    assert len(keys) == 4


def test_a_run_without_a_key_has_no_keys_of_queues() -> None:
    assert PlaceKeys().of_requests([queue_named("forward-1")]) == {}


def test_no_log_shows_the_keys_of_a_place() -> None:
    keys = PlaceKeys(0, (b"", b"secret"), b"secret", (), b"secret")
    assert "secret" not in f"{keys} {keys!r}"
