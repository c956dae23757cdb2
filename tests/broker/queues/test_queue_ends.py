"""The two ends of a queue without a transport: what they say to each other, when, and what they never do."""

from collections.abc import Callable

import pytest
import torch

from stageline.broker.codec.message import Flow, Message
from stageline.broker.errors import BadMessage, Disagreement, Fenced, ForeignMessage, QueueGap
from stageline.broker.queues.base import QueueKey
from stageline.broker.queues.log import Log, RetentionBudget
from stageline.broker.queues.zeromq import requests
from stageline.broker.queues.zeromq.consumer import LONGEST, PATIENCE, REMEMBERED, TOO_OFTEN, Acceptance, Consumer
from stageline.broker.queues.zeromq.producer import Producer
from stageline.broker.queues.zeromq.requests import Credit, Retention, pack, unpack_credit, unpack_retention

KEY = QueueKey(Flow.BACKWARD, 2)


def message(number: int) -> Message:
    return Message("run", KEY.flow, number, 0, KEY.stage, 1, number, torch.full((2,), float(number)))


def take(serial: int, next_: int, credit: int, *, incarnation: int = 5, resend: bool = False) -> Credit:
    return Credit("run", KEY.flow, KEY.stage, incarnation, serial, next_, credit, resend, False)


def standing(serial: int, first: int, sent: int, incarnation: int = 5) -> Retention:
    return Retention("run", KEY.flow, KEY.stage, incarnation, serial, first, sent)


def producer(count: int) -> Producer:
    log = Log("run", KEY, 1, RetentionBudget())
    for number in range(count):
        log.put(message(number), now=0.0)
    return Producer(log)


def sent_by(end: Producer) -> list[tuple[int, int]]:
    """The numbers of the messages now sent, with the number of their frames."""
    sent = []
    while (number := end.due()) is not None:
        sent.append((number, len(end.frames(number))))
        end.did_send(number)
    return sent


def consumer(window: int = 4) -> Consumer:
    return Consumer("run", KEY, 5, window)


def arrive(end: Consumer, *numbers: int, now: float = 0.0) -> list[Acceptance]:
    verdicts = []
    for number in numbers:
        verdicts.append(end.judge(number, b"%d" % number, whole=True))
        if verdicts[-1] is Acceptance.ACCEPT:
            end.accept(message(number), b"%d" % number, now)
    return verdicts


def said(end: Consumer, now: float = 0.0) -> Credit | None:
    """What the consumer says now, said."""
    words = end.request(now)
    if words is not None:
        end.did_say(words, now)
    return words


def test_a_producer_sends_nothing_to_nobody_and_what_is_granted_to_its_consumer() -> None:
    end = producer(6)
    assert sent_by(end) == []
    end.hear(b"a", take(1, 0, 3))
    assert sent_by(end) == [(0, 2), (1, 2), (2, 2)]
    end.hear(b"a", take(2, 2, 5))
    assert sent_by(end) == [(3, 2), (4, 2)]


def test_over_a_new_connection_all_that_is_not_taken_goes_again_at_once() -> None:
    end = producer(6)
    end.hear(b"a", take(1, 0, 4))
    sent_by(end)
    end.hear(b"b", take(2, 2, 4))
    assert sent_by(end) == [(2, 2), (3, 2)]


def test_a_lost_connection_is_not_used_until_the_consumer_speaks_again() -> None:
    end = producer(6)
    end.hear(b"a", take(1, 0, 4))
    sent_by(end)
    end.lose_peer()
    assert sent_by(end) == []
    end.hear(b"a", take(2, 1, 3))
    assert sent_by(end) == [(1, 2), (2, 2)]


def test_only_a_resend_sends_again_over_the_same_connection() -> None:
    end = producer(6)
    end.hear(b"a", take(1, 0, 4))
    sent_by(end)
    end.hear(b"a", take(2, 0, 4))
    assert sent_by(end) == []
    end.hear(b"a", take(3, 1, 4, resend=True))
    assert sent_by(end) == [(1, 2), (2, 2), (3, 2)]


def test_what_was_said_earlier_or_by_an_older_incarnation_counts_for_nothing() -> None:
    end = producer(9)
    end.hear(b"a", take(2, 4, 6))
    sent_by(end)
    end.hear(b"a", take(1, 0, 9, resend=True))
    end.hear(b"a", take(2, 0, 9, resend=True))
    end.hear(b"z", take(99, 0, 9, incarnation=4, resend=True))
    assert end.peer == b"a"
    assert sent_by(end) == []


def test_a_newer_incarnation_begins_where_it_says() -> None:
    end = producer(9)
    end.hear(b"a", take(50, 6, 9))
    sent_by(end)
    end.hear(b"b", take(1, 2, 4, incarnation=6))
    assert sent_by(end) == [(2, 2), (3, 2)]
    assert end.depth(0.0).in_flight == 2


def test_of_what_the_consumer_has_only_headers_go_and_each_once() -> None:
    """A replacement puts its predecessor's messages again: their checksums are compared, their bytes not wanted."""
    end = producer(0)
    end.hear(b"a", take(1, 3, 5))
    for number in range(6):
        end.log.put(message(number), now=0.0)
    assert sent_by(end) == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)]
    end.hear(b"a", take(2, 5, 6))
    assert sent_by(end) == [(5, 2)]


def test_a_standing_tells_what_can_be_had_and_what_was_sent() -> None:
    end = producer(8)
    end.log.trim(2)
    end.hear(b"a", take(7, 3, 6))
    sent_by(end)
    assert end.standing(take(7, 3, 6)) == standing(7, first=2, sent=6)


def test_a_consumer_introduces_itself_and_asks() -> None:
    assert said(consumer()) == Credit("run", KEY.flow, KEY.stage, 5, 1, 0, 4, resend=False, ask=True)


def test_credit_is_renewed_when_half_of_the_window_is_used_up() -> None:
    end = consumer(window=8)
    said(end)
    arrive(end, *range(8))
    renewed = []
    for _ in range(8):
        end.pop()
        words = said(end)
        renewed.append(words.credit if words else None)
    assert renewed == [None, None, None, 12, None, None, None, 16]


@pytest.mark.parametrize("window", [1, 2])
def test_a_small_window_is_renewed_with_every_message(window: int) -> None:
    end = consumer(window)
    said(end)
    for number in range(5):
        arrive(end, number)
        end.pop()
        words = said(end)
        assert words is not None
        assert (words.next, words.credit) == (number + 1, number + 1 + window)


def test_messages_that_nobody_takes_earn_no_credit() -> None:
    end = consumer(window=4)
    arrive(end, 0, 1, 2, 3)
    words = said(end)
    assert words is not None
    assert (words.next, words.credit) == (4, 4)


def test_a_gap_is_complained_about_once() -> None:
    end = consumer(window=8)
    said(end)
    assert arrive(end, 0, 2, 3) == [Acceptance.ACCEPT, Acceptance.DROP, Acceptance.DROP]
    words = said(end)
    assert words is not None
    assert (words.next, words.resend) == (1, True)
    assert arrive(end, 4, 5) == [Acceptance.DROP] * 2
    assert said(end) is None
    arrive(end, 1, 3)
    words = said(end)
    assert words is not None
    assert (words.next, words.resend) == (2, True)


def test_a_header_without_the_tensors_that_are_wanted_is_a_gap() -> None:
    end = consumer()
    said(end)
    assert end.judge(0, b"0", whole=False) is Acceptance.DROP
    words = said(end)
    assert words is not None
    assert words.resend


def test_a_duplicate_is_dropped_and_the_producer_told_how_far_we_are() -> None:
    end = consumer()
    said(end)
    arrive(end, 0, 1)
    assert said(end) is None
    assert arrive(end, 0) == [Acceptance.DROP]
    words = said(end)
    assert words is not None
    assert (words.next, words.resend, words.ask) == (2, False, False)


def test_a_header_that_only_confirms_is_no_reason_to_speak() -> None:
    end = consumer()
    said(end)
    arrive(end, 0, 1)
    assert end.judge(0, b"0", whole=False) is Acceptance.DROP
    assert said(end) is None


@pytest.mark.parametrize("whole", [True, False])
def test_a_duplicate_with_other_bits_is_a_disagreement(whole: bool) -> None:
    end = consumer()
    arrive(end, 0, 1)
    with pytest.raises(Disagreement, match="message 1 of backward-2 came twice with different bits"):
        end.judge(1, b"other", whole=whole)


def test_a_message_that_comes_again_after_a_rewind_must_have_the_same_bits() -> None:
    end = consumer()
    arrive(end, 0, 1)
    end.rewind(0)
    assert arrive(end, 0) == [Acceptance.ACCEPT]
    with pytest.raises(Disagreement):
        end.judge(1, b"other", whole=True)


def test_checksums_are_not_remembered_for_ever() -> None:
    end = consumer()
    arrive(end, *range(REMEMBERED + 1))
    assert end.judge(0, b"other", whole=True) is Acceptance.DROP
    with pytest.raises(Disagreement):
        end.judge(1, b"other", whole=True)


def test_whoever_waits_asks_again_ever_more_rarely_until_something_arrives() -> None:
    end, now, asked = consumer(), 0.0, []
    said(end, now)
    for _ in range(6):
        assert said(end, end.due - 0.001) is None
        now = end.due
        words = said(end, now)
        assert words is not None
        assert words.ask
        asked.append(end.due - now)
    assert asked == [2 * PATIENCE, 4 * PATIENCE, 8 * PATIENCE, LONGEST, LONGEST, LONGEST]
    arrive(end, 0, now=now)
    assert end.due == now + PATIENCE
    said(end, end.due)
    assert end.due == now + 2 * PATIENCE


def test_a_new_producer_is_told_at_once() -> None:
    end = consumer()
    said(end)
    arrive(end, 0, 1, 2)
    assert said(end) is None
    end.meet()
    words = said(end)
    assert words is not None
    assert (words.next, words.ask) == (3, True)


def test_what_was_sent_before_an_answer_and_is_not_here_is_lost() -> None:
    end = consumer()
    said(end)
    arrive(end, 0)
    end.hear(standing(1, first=0, sent=1))
    assert said(end) is None
    end.hear(standing(1, first=0, sent=2))
    words = said(end)
    assert words is not None
    assert (words.next, words.resend) == (1, True)


def test_an_answer_from_before_the_last_resend_proves_nothing() -> None:
    end = consumer()
    said(end)
    arrive(end, 0, 2)
    resend = said(end)
    assert resend is not None
    end.hear(standing(resend.serial - 1, first=0, sent=3))
    assert said(end) is None
    end.hear(standing(resend.serial, first=0, sent=3))
    again = said(end)
    assert again is not None
    assert again.resend


def test_what_the_producer_has_forgotten_cannot_be_waited_for() -> None:
    end = consumer()
    said(end)
    arrive(end, 0)
    with pytest.raises(QueueGap, match=r"message 1 of backward-2 cannot be had any more: .* from 2 on"):
        end.hear(standing(1, first=2, sent=4))


def test_an_answer_to_what_was_said_before_a_rewind_cannot_frighten() -> None:
    end = consumer()
    said(end)
    end.rewind(8)
    said(end)
    end.rewind(3)
    said(end)
    end.hear(standing(2, first=5, sent=9))
    assert end.next == 3


def test_a_zombie_learns_that_it_is_one() -> None:
    end = consumer()
    end.hear(standing(1, first=0, sent=0, incarnation=5))
    with pytest.raises(Fenced, match="backward-2 is taken by incarnation 6 now; this worker is incarnation 5"):
        end.hear(standing(1, first=0, sent=0, incarnation=6))


def test_damage_is_asked_for_again_and_only_too_much_of_it_is_an_error() -> None:
    end = consumer()
    said(end)
    for round_ in range(3):
        for _ in range(TOO_OFTEN):
            end.damaged("a bit fell over")
            words = said(end)
            assert words is not None
            assert (words.next, words.resend) == (round_, True)
        arrive(end, round_)
        end.pop()
        said(end)
    for _ in range(TOO_OFTEN):
        end.damaged("a bit fell over")
    with pytest.raises(BadMessage, match="message 3 of backward-2 arrived damaged 9 times in a row: a bit fell over"):
        end.damaged("a bit fell over")


REQUESTS = [take(3, 7, 11, resend=True), standing(3, first=2, sent=9)]


@pytest.mark.parametrize(
    ("request_", "frame"),
    [
        (REQUESTS[0], "c8fab47f 01 99a372756ea86261636b77617264020503070bc3c2"),
        (REQUESTS[1], "beaa0a2e 01 97a372756ea86261636b776172640205030209"),
    ],
)
def test_requests_have_these_bytes(request_: Credit | Retention, frame: str) -> None:
    assert pack(request_) == bytes.fromhex(frame)


def test_requests_come_as_they_were_said() -> None:
    assert unpack_credit(pack(REQUESTS[0])) == REQUESTS[0]
    assert unpack_retention(pack(REQUESTS[1])) == REQUESTS[1]


@pytest.mark.parametrize(("request_", "unpack"), [(REQUESTS[0], unpack_credit), (REQUESTS[1], unpack_retention)])
def test_no_damaged_request_is_understood(request_: Credit | Retention, unpack: Callable[[bytes], object]) -> None:
    frame = pack(request_)
    for place in range(len(frame)):
        for bit in range(8):
            damaged = bytearray(frame)
            damaged[place] ^= 1 << bit
            with pytest.raises(BadMessage):
                unpack(bytes(damaged))
    for length in range(len(frame)):
        with pytest.raises(BadMessage):
            unpack(frame[:length])


def test_a_request_of_another_version_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_VERSION", b"\x02")
    frame = pack(REQUESTS[0])
    with pytest.raises(ForeignMessage, match="speaks version 2 of its requests, this one 1"):
        unpack_credit(frame)


def test_a_request_with_impossible_numbers_is_not_understood() -> None:
    with pytest.raises(BadMessage, match="malformed"):
        unpack_credit(pack(take(1, -1, 4)))
