"""The consuming end of a queue: what it accepts, what credit it grants, and what it reports missing."""

import pytest
import torch

from stageline.broker.codec.message import Message
from stageline.broker.errors import BadMessage, Disagreement, QueueGap
from stageline.broker.queues.delivery import REMEMBERED, TOO_OFTEN, Receiver, Retention
from support.queue_pair import queue_of

KEY = queue_of("backward-2")


def message(number: int) -> Message:
    return Message("run", KEY.name, number, 1, torch.full((2,), float(number)))


def receiver(window: int = 4) -> Receiver:
    return Receiver(queue_of("backward-2", count=1, window=window))


def arrive(end: Receiver, *numbers: int) -> list[bool]:
    accepted = []
    for number in numbers:
        accepted.append(end.accepts(number, b"%d" % number))
        if accepted[-1]:
            end.accept(message(number), b"%d" % number)
    return accepted


def reported(end: Receiver) -> tuple[int, int, bool] | None:
    """The next message, the limit and whether to send again, if that is reported now."""
    if not end.must_report:
        return None
    report = end.next, end.limit, end.resend
    end.mark_reported(end.limit)
    return report


def test_messages_are_taken_in_order_and_once() -> None:
    end = receiver()
    assert arrive(end, 0, 0, 1) == [True, False, True]
    assert [end.pop().number for _ in range(len(end.ready))] == [0, 1]
    assert (end.taken, end.next) == (2, 2)


def test_a_receiver_grants_its_window_at_once() -> None:
    assert reported(receiver(window=4)) == (0, 4, False)


def test_credit_is_renewed_when_half_of_the_window_is_used_up() -> None:
    end = receiver(window=8)
    reported(end)
    arrive(end, *range(8))
    renewed = []
    for _ in range(8):
        end.pop()
        report = reported(end)
        renewed.append(report[1] if report else None)
    assert renewed == [None, None, None, 12, None, None, None, 16]


@pytest.mark.parametrize("window", [1, 2])
def test_a_small_window_is_renewed_with_every_message(window: int) -> None:
    end = receiver(window)
    reported(end)
    for number in range(5):
        arrive(end, number)
        end.pop()
        assert reported(end) == (number + 1, number + 1 + window, False)


def test_messages_that_are_not_taken_earn_no_credit() -> None:
    end = receiver(window=4)
    arrive(end, 0, 1, 2, 3)
    assert reported(end) == (4, 4, False)
    assert end.room == 0


def test_a_lost_message_is_reported_once() -> None:
    end = receiver(window=8)
    reported(end)
    assert arrive(end, 0, 2, 3) == [True, False, False]
    assert reported(end) == (1, 8, True)
    assert arrive(end, 4, 5) == [False] * 2
    assert reported(end) is None
    arrive(end, 1, 3)
    assert reported(end) == (2, 8, True)


def test_a_header_without_the_tensors_that_are_needed_is_a_loss() -> None:
    end = receiver()
    reported(end)
    assert not end.accepts(0, b"0", whole=False)
    assert reported(end) == (0, 4, True)


def test_a_duplicate_is_dropped_and_the_producer_learns_what_has_arrived() -> None:
    end = receiver()
    reported(end)
    arrive(end, 0, 1)
    assert reported(end) is None
    assert arrive(end, 0) == [False]
    assert reported(end) == (2, 4, False)


def test_a_header_that_only_confirms_is_no_reason_to_report() -> None:
    end = receiver()
    reported(end)
    arrive(end, 0, 1)
    assert not end.accepts(0, b"0", whole=False)
    assert reported(end) is None


@pytest.mark.parametrize("whole", [True, False])
def test_a_duplicate_with_other_bits_is_a_disagreement(whole: bool) -> None:
    end = receiver()
    arrive(end, 0, 1)
    with pytest.raises(Disagreement, match="message 1 of backward-2 came twice with different bits"):
        end.accepts(1, b"other", whole=whole)


def test_a_message_that_comes_again_after_a_rewind_must_have_the_same_bits() -> None:
    end = receiver()
    arrive(end, 0, 1)
    end.rewind(0)
    assert arrive(end, 0) == [True]
    with pytest.raises(Disagreement):
        end.accepts(1, b"other")


def test_fingerprints_are_not_kept_for_ever() -> None:
    end = receiver()
    arrive(end, *range(REMEMBERED + 1))
    assert not end.accepts(0, b"other")
    with pytest.raises(Disagreement):
        end.accepts(1, b"other")


def test_fingerprints_outlast_a_rewind() -> None:
    end = receiver()
    arrive(end, *range(REMEMBERED + 2))
    end.rewind(0)
    assert arrive(end, 0, 1) == [True, True]  # as little is known of them as of messages that never came
    with pytest.raises(Disagreement):
        end.accepts(2, b"other")


def test_what_was_sent_and_did_not_arrive_is_lost() -> None:
    end = receiver()
    arrive(end, 0)
    assert not end.was_sent(Retention(first=0, sent=1))
    assert end.was_sent(Retention(first=0, sent=2))


def test_a_message_that_the_producer_has_forgotten_is_a_gap() -> None:
    end = receiver()
    arrive(end, 0)
    with pytest.raises(QueueGap, match=r"message 1 of backward-2 is no longer available: .* from 2 on"):
        end.was_sent(Retention(first=2, sent=4))


def test_a_message_may_arrive_damaged_but_not_too_often_in_a_row() -> None:
    end = receiver()
    for number in range(3):
        for _ in range(TOO_OFTEN):
            end.count_damage("a flipped bit")
        arrive(end, number)
    for _ in range(TOO_OFTEN):
        end.count_damage("a flipped bit")
    with pytest.raises(BadMessage, match="message 3 of backward-2 arrived damaged 9 times in a row: a flipped bit"):
        end.count_damage("a flipped bit")


def test_what_comes_in_vain_is_counted() -> None:
    end = receiver()
    arrive(end, 0, 1, 0, 1, 3)
    end.count_damage("its checksum is wrong")
    end.lose()
    counts = end.intake()
    assert (counts.received, counts.taken, counts.granted) == (2, 0, 0)
    assert (counts.duplicates, counts.damaged, counts.lost) == (2, 1, 2)  # a gap before 3, and the damage


def test_a_rewind_is_no_loss() -> None:
    end = receiver()
    arrive(end, 0, 1)
    end.rewind(0)
    end.restart()
    assert reported(end) == (0, 4, True)
    assert end.intake().lost == 0
