"""The comparison of what both ends of a queue report of its messages."""

from stageline.broker.ledger.ledger import REMEMBERED, QueueDigests


def test_the_first_step_whose_messages_differ_at_both_ends_is_named() -> None:
    known = QueueDigests()
    assert known.differing([("forward-1", step, f"{step:016x}") for step in range(4)]) is None
    assert known.differing([("backward-0", 1, "f" * 16)]) is None
    assert known.differing([("forward-1", 1, f"{1:016x}"), ("forward-1", 2, "f" * 16)]) == ("forward-1", 2)


def test_a_run_of_any_length_keeps_a_bounded_number_of_them() -> None:
    known = QueueDigests()
    assert known.differing(("forward-1", step, f"{step:016x}") for step in range(REMEMBERED + 1)) is None
    assert known.differing([("forward-1", 0, "f" * 16)]) is None  # no longer known
    assert known.differing([("forward-1", REMEMBERED, "e" * 16)]) == ("forward-1", REMEMBERED)
