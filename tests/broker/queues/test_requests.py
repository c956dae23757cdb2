"""Requests between the two ends of a queue: the bytes, and when they are sent again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.broker.codec.message import Message
from stageline.broker.errors import BadMessage, Fenced, ForeignMessage, QueueGap
from stageline.broker.queues import requests
from stageline.broker.queues.delivery import Credit, Receiver, Sender
from stageline.broker.queues.log import Log, RetentionBudget
from stageline.broker.queues.requests import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    CreditRequest,
    Requester,
    RetentionReply,
    pack,
    reply_to,
    run_named_in,
    unpack,
)
from support.queue_pair import queue_of

KEY = queue_of("backward-2", count=1)


def credit_request(serial: int, next_: int, credit: int, *, resend: bool = False) -> CreditRequest:
    return CreditRequest("run", KEY.name, 5, serial, next_, credit, resend, False)


def reply(serial: int, first: int, sent: int, incarnation: int = 5) -> RetentionReply:
    return RetentionReply("run", KEY.name, incarnation, serial, first, sent)


def requester(window: int = 4) -> Requester:
    return Requester("run", 5, Receiver(queue_of("backward-2", count=1, window=window)))


def arrive(end: Requester, *numbers: int, now: float = 0.0) -> None:
    for number in numbers:
        if end.receiver.accepts(number, b"%d" % number):
            end.receiver.accept(Message("run", KEY.name, number, 1, torch.ones(2)), b"%d" % number)
            end.postpone(now)


def sent_by(end: Requester, now: float = 0.0) -> CreditRequest | None:
    """The request that is due now, sent."""
    request = end.request(now)
    if request is not None:
        end.mark_sent(request, now)
    return request


def test_the_first_request_asks_for_a_reply() -> None:
    assert sent_by(requester()) == CreditRequest("run", KEY.name, 5, 1, 0, 4, resend=False, ask=True)


@pytest.mark.parametrize(("resend", "missing"), [(False, None), (True, 7)])
def test_a_request_is_a_credit_that_says_what_is_missing(resend: bool, missing: int | None) -> None:
    assert credit_request(3, 7, 11, resend=resend).to_credit() == Credit(5, 3, 7, 11, missing)


def test_the_reply_says_what_can_be_had_and_what_was_sent() -> None:
    log = Log("run", KEY, RetentionBudget())
    for number in range(8):
        log.put(Message("run", KEY.name, number, 1, torch.ones(2)), now=0.0)
    log.trim(2)
    sender, request = Sender(log), credit_request(7, 3, 6)
    sender.update(request.to_credit(), b"a")
    while (number := sender.due()) is not None:
        sender.mark_sent(number)
    assert reply_to(request, sender) == reply(7, first=2, sent=6)


def test_a_loss_is_requested_again_once() -> None:
    end = requester(window=8)
    sent_by(end)
    arrive(end, 0, 2, 3)
    request = sent_by(end)
    assert request is not None
    assert (request.next, request.resend) == (1, True)
    arrive(end, 4, 5)
    assert sent_by(end) is None


def test_while_nothing_arrives_the_request_is_repeated_ever_more_rarely() -> None:
    end, now, asked = requester(), 0.0, []
    sent_by(end, now)
    for _ in range(6):
        assert sent_by(end, end.due - 0.001) is None
        now = end.due
        request = sent_by(end, now)
        assert request is not None
        assert request.ask
        asked.append(end.due - now)
    assert asked == [2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    arrive(end, 0, now=now)
    assert end.due == now + FIRST_PAUSE
    sent_by(end, end.due)
    assert end.due == now + 2 * FIRST_PAUSE


def test_a_new_producer_gets_a_request_at_once() -> None:
    end = requester()
    sent_by(end)
    arrive(end, 0, 1, 2)
    assert sent_by(end) is None
    end.introduce()
    request = sent_by(end)
    assert request is not None
    assert (request.next, request.ask) == (3, True)


def test_what_was_sent_before_a_reply_and_is_not_here_is_lost() -> None:
    end = requester()
    sent_by(end)
    arrive(end, 0)
    end.receive(reply(1, first=0, sent=1))
    assert sent_by(end) is None
    end.receive(reply(1, first=0, sent=2))
    request = sent_by(end)
    assert request is not None
    assert (request.next, request.resend) == (1, True)


def test_a_reply_from_before_the_last_resend_proves_nothing() -> None:
    end = requester()
    sent_by(end)
    arrive(end, 0, 2)
    resend = sent_by(end)
    assert resend is not None
    end.receive(reply(resend.serial - 1, first=0, sent=3))
    assert sent_by(end) is None
    end.receive(reply(resend.serial, first=0, sent=3))
    again = sent_by(end)
    assert again is not None
    assert again.resend


def test_what_the_producer_has_forgotten_is_not_waited_for() -> None:
    end = requester()
    sent_by(end)
    arrive(end, 0)
    with pytest.raises(QueueGap, match=r"message 1 of backward-2 is no longer available: .* from 2 on"):
        end.receive(reply(1, first=2, sent=4))


def test_a_reply_to_a_request_from_before_a_rewind_is_no_gap() -> None:
    end = requester()
    sent_by(end)
    end.rewind(8)
    sent_by(end)
    end.rewind(3)
    sent_by(end)
    end.receive(reply(2, first=5, sent=9))
    assert end.receiver.next == 3


def test_a_replaced_consumer_is_fenced() -> None:
    end = requester()
    end.receive(reply(1, first=0, sent=0, incarnation=5))
    with pytest.raises(Fenced, match="backward-2 is taken by incarnation 6 now; this worker is incarnation 5"):
        end.receive(reply(1, first=0, sent=0, incarnation=6))


QUEUE_KEY = b"q" * 32
QUEUE_KEYS = {"backward-2": QUEUE_KEY}
REQUESTS = [credit_request(3, 7, 11, resend=True), reply(3, first=2, sent=9)]


@pytest.mark.parametrize(
    ("request_", "frame"),
    [
        (REQUESTS[0], "5ed247238e9aa00c98a16babe88eeb0d 03 98a372756eaa6261636b776172642d320503070bc3c2"),
        (REQUESTS[1], "8ba467e176c95dda97d6ee2660860138 03 96a372756eaa6261636b776172642d3205030209"),
    ],
)
def test_requests_have_these_bytes(request_: CreditRequest | RetentionReply, frame: str) -> None:
    assert pack(request_, QUEUE_KEYS) == bytes.fromhex(frame)


def test_requests_arrive_as_they_were_sent() -> None:
    for keys in (QUEUE_KEYS, {}):
        assert unpack(pack(REQUESTS[0], keys), CreditRequest, keys) == REQUESTS[0]
        assert unpack(pack(REQUESTS[1], keys), RetentionReply, keys) == REQUESTS[1]


@pytest.mark.parametrize("keys", [{}, {"backward-2": b"x" * 32}], ids=["no key", "another key"])
@pytest.mark.parametrize("request_", REQUESTS)
def test_no_request_is_accepted_without_the_queues_key(
    request_: CreditRequest | RetentionReply, keys: dict[str, bytes]
) -> None:
    with pytest.raises(BadMessage, match="damaged, or from a process outside the run"):
        unpack(pack(request_, keys), type(request_), QUEUE_KEYS)


@pytest.mark.parametrize("request_", REQUESTS)
def test_the_key_of_a_queue_moves_no_credit_of_another_queue(request_: CreditRequest | RetentionReply) -> None:
    frame = pack(request_, QUEUE_KEYS)
    for others in ({"forward-2": QUEUE_KEY}, {"forward-2": QUEUE_KEY, "backward-2": b"x" * 32}):
        with pytest.raises(BadMessage, match="damaged, or from a process outside the run"):
            unpack(frame, type(request_), others)


def test_a_request_of_another_run_still_names_that_run() -> None:
    assert run_named_in(pack(REQUESTS[0], QUEUE_KEYS)) == "run"
    for frame in (b"", b"garbage", pack(REQUESTS[0])[:20]):
        with pytest.raises(BadMessage):
            run_named_in(frame)


@pytest.mark.parametrize("keys", [{}, QUEUE_KEYS], ids=["no key", "a key"])
@pytest.mark.parametrize("request_", REQUESTS)
def test_no_damaged_request_is_accepted(request_: CreditRequest | RetentionReply, keys: dict[str, bytes]) -> None:
    frame = pack(request_, keys)
    for place in range(len(frame)):
        for bit in range(8):
            damaged = bytearray(frame)
            damaged[place] ^= 1 << bit
            with pytest.raises(BadMessage):
                unpack(bytes(damaged), type(request_), keys)
    for length in range(len(frame)):
        with pytest.raises(BadMessage):
            unpack(frame[:length], type(request_), keys)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_of_a_stranger_are_a_request_and_none_raise_what_is_not_expected(junk: bytes) -> None:
    for body in (junk, bytes([requests.VERSION]) + junk, pack(REQUESTS[0])[requests.SEAL_BYTES :] + junk[:1]):
        for kind in (CreditRequest, RetentionReply):
            with pytest.raises(BadMessage):
                unpack(bytes(requests.SEAL_BYTES) + body, kind, QUEUE_KEYS)


def test_a_request_of_another_version_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_VERSION", b"\x09")
    frame = pack(REQUESTS[0])
    with pytest.raises(ForeignMessage, match="has version 9 of its requests, this one 3"):
        unpack(frame, CreditRequest)


def test_a_request_with_impossible_numbers_is_refused() -> None:
    with pytest.raises(BadMessage, match="malformed"):
        unpack(pack(credit_request(1, -1, 4)), CreditRequest)
