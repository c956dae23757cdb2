"""The producing end of a queue: what it sends, over which connection, and what it never sends."""

import pytest
import torch

from stageline.broker.codec.message import Message
from stageline.broker.control.queue_counts import Resend, ResendReason
from stageline.broker.queues.delivery import Credit, Retention, Sender
from stageline.broker.queues.log import Log, RetentionBudget
from support.queue_pair import queue_of

KEY = queue_of("backward-2", count=1)


def message(number: int) -> Message:
    return Message("run", KEY.name, number, 1, torch.full((2,), float(number)))


def credit(serial: int, received: int, limit: int, *, incarnation: int = 5, missing: int | None = None) -> Credit:
    return Credit(incarnation, serial, received, limit, missing)


def sender(count: int) -> Sender:
    log = Log("run", KEY, RetentionBudget())
    for number in range(count):
        log.put(message(number), now=0.0)
    return Sender(log)


def sent_by(end: Sender) -> list[tuple[int, int]]:
    """The numbers of the messages now sent, with the number of their frames."""
    sent = []
    while (number := end.due()) is not None:
        sent.append((number, len(end.frames(number))))
        end.mark_sent(number)
    return sent


def test_nothing_is_sent_without_credit_and_then_what_it_grants() -> None:
    end = sender(6)
    assert sent_by(end) == []
    end.update(credit(1, 0, 3), b"a")
    assert sent_by(end) == [(0, 2), (1, 2), (2, 2)]
    end.update(credit(2, 2, 5), b"a")
    assert sent_by(end) == [(3, 2), (4, 2)]


def test_over_a_new_connection_all_that_has_not_arrived_is_sent_again_at_once() -> None:
    end = sender(6)
    end.update(credit(1, 0, 4), b"a")
    sent_by(end)
    end.update(credit(2, 2, 4), b"b")
    assert sent_by(end) == [(2, 2), (3, 2)]


def test_a_report_that_is_not_newer_changes_nothing_not_even_the_connection() -> None:
    """One that was recorded and sent again over another connection took the queue there."""
    end = sender(6)
    end.update(credit(1, 0, 4), b"a")
    end.update(credit(2, 2, 4), b"a")
    sent_by(end)
    for old in (credit(2, 2, 4), credit(1, 0, 6), credit(9, 0, 6, incarnation=4)):
        assert not end.update(old, b"b")
    assert (end.route, end.sent, end.received, end.limit, end.newest) == (b"a", 4, 2, 4, (5, 2))


def test_a_lost_connection_is_not_used_until_credit_comes_again() -> None:
    end = sender(6)
    end.update(credit(1, 0, 4), b"a")
    sent_by(end)
    end.route = None
    assert sent_by(end) == []
    end.update(credit(2, 1, 3), b"a")
    assert sent_by(end) == [(1, 2), (2, 2)]


def test_only_what_is_missing_is_sent_again_over_the_same_connection() -> None:
    end = sender(6)
    end.update(credit(1, 0, 4), b"a")
    sent_by(end)
    end.update(credit(2, 0, 4), b"a")
    assert sent_by(end) == []
    end.update(credit(3, 1, 4, missing=1), b"a")
    assert sent_by(end) == [(1, 2), (2, 2), (3, 2)]


def test_what_was_trimmed_is_not_sent_again_though_it_is_missing() -> None:
    end = sender(6)
    end.update(credit(1, 0, 5), b"a")
    sent_by(end)
    end.log.trim(3)
    end.update(credit(2, 1, 5, missing=1), b"a")
    assert sent_by(end) == []
    end.update(credit(3, 1, 5, missing=1), b"b")
    assert sent_by(end) == [(3, 2), (4, 2)]


def test_an_earlier_credit_or_one_of_an_older_incarnation_changes_nothing() -> None:
    end = sender(9)
    end.update(credit(2, 4, 6), b"a")
    sent_by(end)
    assert not end.update(credit(1, 0, 9, missing=0), b"a")
    assert not end.update(credit(2, 0, 9, missing=0), b"a")
    assert not end.update(credit(99, 0, 9, incarnation=4, missing=0), b"z")
    assert end.route == b"a"
    assert sent_by(end) == []


def test_a_newer_incarnation_begins_where_its_credit_says() -> None:
    end = sender(9)
    end.update(credit(50, 6, 9), b"a")
    sent_by(end)
    assert end.update(credit(1, 2, 4, incarnation=6), b"b")
    assert sent_by(end) == [(2, 2), (3, 2)]
    assert end.depth(0.0).in_flight == 2


def test_of_what_the_consumer_has_only_headers_are_sent_and_each_once() -> None:
    """A replacement puts its predecessor's messages again: their checksums are compared, their bytes not needed."""
    end = sender(0)
    end.update(credit(1, 3, 5), b"a")
    for number in range(6):
        end.log.put(message(number), now=0.0)
    assert sent_by(end) == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)]
    end.update(credit(2, 5, 6), b"a")
    assert sent_by(end) == [(5, 2)]


def test_retention_says_what_can_be_had_and_what_was_sent() -> None:
    end = sender(8)
    end.log.trim(2)
    end.update(credit(7, 3, 6), b"a")
    sent_by(end)
    assert end.retention == Retention(first=2, sent=6)


@pytest.mark.parametrize(("received", "ready", "in_flight"), [(0, 2, 4), (3, 2, 1), (4, 2, 0)])
def test_depth_counts_what_waits_and_what_is_on_its_way(received: int, ready: int, in_flight: int) -> None:
    end = sender(6)
    end.update(credit(1, 0, 4), b"a")
    sent_by(end)
    end.update(credit(2, received, 4), b"a")
    depth = end.depth(3.0)
    assert (depth.ready, depth.in_flight, depth.retained, depth.oldest) == (ready, in_flight, 6, 3.0)


def test_what_is_sent_again_is_counted_with_its_reason_and_its_age() -> None:
    end = sender(6)
    end.update(credit(1, 0, 5), b"a")
    sent_by(end)
    assert end.depth(10.0).resent == 0
    end.update(credit(2, 2, 5, missing=2), b"a")
    assert end.depth(11.0).resends == (Resend(2, 5, ResendReason.MISSING, 0.0),)
    sent_by(end)
    end.update(credit(3, 4, 6), b"b")
    newest = end.depth(13.0)
    assert newest.resent == 4
    assert newest.resends == (Resend(2, 5, ResendReason.MISSING, 2.0), Resend(4, 5, ResendReason.CONNECTION, 0.0))


def test_only_the_newest_resends_are_kept_and_all_are_counted() -> None:
    end = sender(9)
    for number in range(9):
        end.update(credit(2 * number + 1, number, number + 1), b"a")
        sent_by(end)
        end.update(credit(2 * number + 2, number, number + 1, missing=number), b"a")
        sent_by(end)
    depth = end.depth(1.0)
    assert depth.resent == 9
    assert [each.first for each in depth.resends] == [5, 6, 7, 8]


def test_nothing_is_counted_as_resent_that_was_not_sent_before() -> None:
    end = sender(6)
    end.update(credit(1, 0, 3), b"a")
    end.update(credit(2, 0, 3, missing=0), b"b")
    assert (end.depth(0.0).resent, end.depth(0.0).resends) == (0, ())
