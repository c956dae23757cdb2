"""No fault of the wire changes what a queue delivers: seeded worlds on a virtual clock, hundreds of them."""

from collections import Counter
from typing import Any

import pytest
import torch

from stageline.broker.errors import Disagreement, Fenced
from stageline.broker.queues.requests import CreditRequest
from support.faulty_wire import KEY, MICROBATCHES, RUN, Faults, WireWorld, value


def seeds(quick: int, of: int) -> list[Any]:
    """`of` seeds, of which `make test` runs so many `quick`, and `make test-all` the others."""
    return [*range(quick), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(quick, of))]


def expected(numbers: range) -> list[tuple[int, bytes]]:
    return [(number, value(number).numpy().tobytes()) for number in numbers]


@pytest.mark.parametrize("seed", seeds(50, of=300))
def test_no_fault_of_the_wire_changes_what_is_delivered(seed: int) -> None:
    world = WireWorld(seed)
    world.run()
    assert world.delivered == expected(range(world.end))


@pytest.mark.parametrize("seed", seeds(25, of=100))
def test_a_replaced_producer_goes_on_where_the_consumer_is(seed: int) -> None:
    world = WireWorld(seed)
    at = world.dice.randrange(1, world.end)
    world.run(until=lambda: len(world.delivered) == at)
    world.start_producer(incarnation=3, step=world.dice.randrange(at // MICROBATCHES + 1))
    world.run()
    assert world.delivered == expected(range(world.end))


@pytest.mark.parametrize("seed", seeds(25, of=100))
def test_a_replaced_consumer_gets_everything_from_its_step_on(seed: int) -> None:
    world = WireWorld(seed)
    at = world.dice.randrange(1, world.end)
    world.run(until=lambda: len(world.delivered) == at)
    step = world.dice.randrange(at // MICROBATCHES + 1)
    world.start_consumer(incarnation=3, step=step)
    world.run()
    assert world.delivered == expected(range(at)) + expected(range(step * MICROBATCHES, world.end))


@pytest.mark.parametrize("seed", seeds(25, of=100))
def test_both_ends_may_be_replaced_again_and_again(seed: int) -> None:
    world, incarnation = WireWorld(seed, steps=6), 3
    for _ in range(world.dice.randrange(2, 6)):
        at = len(world.delivered) + world.dice.randrange(1, 9)
        world.run(
            until=lambda at=at: len(world.delivered) >= at or world.delivered[-1:] == expected(range(world.end))[-1:]
        )
        step = world.dice.randrange(world.delivered[-1][0] // MICROBATCHES + 1)
        world.start_producer(incarnation, step)
        world.start_consumer(incarnation + 1, step)
        world.delivered = expected(range(step * MICROBATCHES))
        incarnation += 2
    world.run()
    assert world.delivered == expected(range(world.end))


@pytest.mark.parametrize("seed", range(50))
def test_a_stale_worker_changes_nothing(seed: int) -> None:
    world = WireWorld(seed)
    world.start_consumer(incarnation=7, step=0)

    def haunt() -> bool:
        stale = CreditRequest(RUN, KEY.name, 2, world.dice.randrange(100), 0, 10**6, resend=True, ask=False)
        if world.dice.random() < 0.1:
            world.request(stale)
        return len(world.delivered) == world.end

    world.run(until=haunt)
    assert world.delivered == expected(range(world.end))


def test_every_kind_of_fault_fires() -> None:
    fired: Counter[str] = Counter()
    for seed in range(40):
        world = WireWorld(seed)
        world.run()
        fired += world.fired
    assert min(fired[fault] for fault in ("drop", "repeat", "damage", "cut", "overtake")) > 20


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_no_more_than_the_window_is_under_way(window: int) -> None:
    for seed in range(20):
        world = WireWorld(seed, Faults(slowness=0.5), window=window)
        world.run()
        assert world.delivered == expected(range(world.end))
        assert world.most_in_flight == window


def test_a_wire_without_faults_carries_every_message_once() -> None:
    world = WireWorld(1, Faults())
    world.run()
    assert not +world.fired


@pytest.mark.parametrize("seed", range(30))
def test_a_producer_that_computes_other_bits_after_its_replacement_is_found(seed: int) -> None:
    world = WireWorld(seed, Faults(slowness=0.1), window=3)
    world.run(until=lambda: len(world.delivered) == 20)
    wrong = world.dice.randrange(20)
    world.compute = lambda number: value(number) + (number == wrong) * torch.tensor(1e-12)
    world.start_producer(incarnation=3, step=0)
    with pytest.raises(Disagreement, match=f"message {wrong} of forward-1 came twice with different bits"):
        world.run()


def test_a_stale_consumer_that_requests_is_fenced() -> None:
    world = WireWorld(5, Faults())
    stale = world.receiver, world.requester
    world.start_consumer(incarnation=9, step=0)
    world.run(until=lambda: len(world.delivered) == 3)
    world.receiver, world.requester = stale
    world.requester.introduce()
    with pytest.raises(Fenced, match="incarnation 9 now; this worker is incarnation 2"):
        world.run()
