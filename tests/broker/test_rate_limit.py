"""So many in a second, and the others counted."""

from stageline.broker.rate_limit import RateLimit


def test_beyond_the_limit_of_a_second_all_are_withheld_and_counted():
    limit = RateLimit(2)
    assert [limit.allows(10.0 + n / 10) for n in range(4)] == [True, True, False, False]
    assert limit.take_withheld() == 2
    assert limit.take_withheld() == 0


def test_the_next_second_has_a_limit_of_its_own():
    limit = RateLimit(1)
    assert [limit.allows(now) for now in (5.0, 5.9, 6.0, 6.5, 7.1)] == [True, False, True, False, True]


def test_an_amount_may_be_larger_than_what_is_left_and_uses_up_the_second():
    limit = RateLimit(10)
    assert [limit.allows(0.0, 30), limit.allows(0.9, 1), limit.allows(1.0, 9), limit.allows(1.0, 9)] == [
        True,
        False,
        True,
        True,
    ]
    assert not limit.allows(1.5)
