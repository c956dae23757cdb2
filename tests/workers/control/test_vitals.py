"""The offset of the broker's clock, as a worker estimates it from the answers to its reports."""

from random import Random

import pytest

from stageline.workers.control.vitals import SAMPLES, BrokerClock, resident_memory

AHEAD = 3.0  # seconds


@pytest.mark.parametrize("seed", range(5))
def test_the_offset_is_that_of_the_shortest_round_trip_and_right_within_its_uncertainty(seed: int) -> None:
    random, clock, now = Random(seed), BrokerClock(), 1000.0
    assert clock.offset is None
    for number in range(1, 40):
        there, back = random.expovariate(100), random.expovariate(20)
        clock.sent(number, now)
        clock.answered(number, now + there + AHEAD, now + there + back)
        now += 0.1
    assert clock.offset is not None
    ahead, uncertain = clock.offset
    assert abs(ahead - AHEAD) <= uncertain


@pytest.mark.parametrize("step", [AHEAD, -AHEAD, 0.05])
def test_a_clock_that_is_set_is_noticed_at_the_next_answer(step: float) -> None:
    """The offset of before counted for 64 answers more: messages seemed to be on their way for seconds."""
    clock = BrokerClock()
    for number in range(1, SAMPLES):
        clock.sent(number, float(number))
        clock.answered(number, number + 0.01, number + 0.02)
    clock.sent(SAMPLES, 1000.0)
    clock.answered(SAMPLES, 1000.0 + 0.02 + step, 1000.04)
    assert clock.offset == pytest.approx((step, 0.02))


def test_an_answer_that_has_waited_contradicts_nothing() -> None:
    clock = BrokerClock()
    for number, seconds in ((1, 0.02), (2, 5.0)):
        clock.sent(number, 10.0 * number)
        clock.answered(number, 10.0 * number + 0.01, 10.0 * number + seconds)
    assert clock.offset == pytest.approx((0.0, 0.01))


def test_an_answer_without_a_time_and_one_to_another_report_are_no_samples() -> None:
    clock = BrokerClock()
    clock.sent(1, 10.0)
    clock.answered(2, 10.0, 10.1)
    clock.answered(1, 0.0, 10.1)
    clock.answered(1, 10.0, 10.2)  # a second time
    assert clock.offset is None


def test_the_memory_of_this_process_is_read_once_a_second() -> None:
    now = 0.0
    resident = resident_memory(lambda: now)
    first = resident()
    held = bytearray(32 * 2**20)
    assert first > 2**20
    assert resident() == first
    now = 1.0
    assert resident() >= first + len(held) // 2
