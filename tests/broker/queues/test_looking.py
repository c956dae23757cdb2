"""How long a worker looks for a message before it sleeps."""

import pytest

from stageline.broker.queues.delivery import LOOK, MOST, Looking


def sleeps_until_it_looks(looking: Looking) -> int:
    """The waits that sleep at once, before one that does not."""
    count = 0
    while not looking.seconds():
        count += 1
        assert count <= MOST, "it looks no more"
    return count


@pytest.mark.parametrize("processors", [2, 64])
def test_a_worker_with_several_processors_looks_first(processors: int) -> None:
    assert Looking(processors).seconds() == LOOK


def test_a_worker_goes_on_looking_as_long_as_it_finds_messages() -> None:
    looking = Looking(2)
    for _ in range(100):
        assert looking.seconds() == LOOK
        looking.ended(LOOK, LOOK / 2)


def test_each_time_in_vain_doubles_the_waits_that_sleep_at_once() -> None:
    looking, counts = Looking(2), []
    for _ in range(8):
        counts.append(sleeps_until_it_looks(looking))
        looking.ended(LOOK, None)
    assert counts == [0, 2, 4, 8, 16, 32, MOST, MOST]


def test_one_message_found_makes_it_look_again_at_once_and_forgets_what_was_in_vain() -> None:
    looking = Looking(2)
    for _ in range(6):
        looking.ended(LOOK, 2 * LOOK)
    assert sleeps_until_it_looks(looking) == MOST
    looking.ended(LOOK, LOOK)
    assert looking.seconds() == LOOK
    looking.ended(LOOK, 2 * LOOK)
    assert sleeps_until_it_looks(looking) == 2


def test_with_one_processor_a_worker_rarely_looks() -> None:
    """The producer computes on the same one: to look takes it away."""
    looking = Looking(1)
    assert sleeps_until_it_looks(looking) == MOST
    looking.ended(LOOK, 2 * LOOK)
    assert sleeps_until_it_looks(looking) == MOST


def test_waits_that_slept_at_once_count_neither_as_in_vain_nor_as_found() -> None:
    """They counted, so that a worker slept in all waits once it had looked in vain."""
    looking = Looking(2)
    looking.ended(LOOK, None)
    for waited in (None, 2 * LOOK):
        assert not looking.seconds()
        looking.ended(0.0, waited)
    assert looking.seconds() == LOOK


def test_a_wait_that_slept_and_was_short_makes_it_look_again_at_once() -> None:
    looking = Looking(2)
    for _ in range(6):
        looking.ended(LOOK, 2 * LOOK)
    assert not looking.seconds()
    looking.ended(0.0, 2 * LOOK)
    assert not looking.seconds(), "looking for as long as it does would have been in vain"
    looking.ended(0.0, LOOK / 2)
    assert looking.seconds() == LOOK


def test_with_one_processor_a_short_wait_does_not_make_it_look() -> None:
    looking = Looking(1)
    looking.ended(0.0, 0.0)
    assert not looking.seconds()
