"""Promises of every queue, on every transport. broker/queues/base.py has them in words."""

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stageline.broker.codec.message import decode
from stageline.broker.errors import Disagreement, Overwritten, QueueClosed, QueueFull, QueueGap
from support.payloads import bits, trees
from support.queue_pair import LINES, QueuePair, queue_of, wait_for

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

MakeLine = Callable[..., QueuePair]


@pytest.fixture(params=LINES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeLine]:
    lines: list[QueuePair] = []

    def make_line(**terms: Any) -> QueuePair:
        folder = tmp_path / str(len(lines))
        folder.mkdir()
        lines.append(LINES[request.param](folder, **terms))
        return lines[-1]

    yield make_line
    for line in lines:
        line.close()


@pytest.fixture
def line(make: MakeLine) -> QueuePair:
    return make()


def test_messages_come_in_the_order_they_were_put(line: QueuePair) -> None:
    line.put(*range(30))
    assert line.take_numbers(30) == list(range(30))


def test_a_taken_message_is_the_one_that_was_put(line: QueuePair) -> None:
    payload = (torch.randn(3, 4), {"mask": torch.tensor([True, False]), "scale": 0.5}, [None, 7, "words"])
    sent = line.message(0, payload)
    line.outbound.put(sent)
    received = line.take()
    assert received.identity == sent.identity
    assert bits(received.payload) == bits(payload)


def test_nothing_comes_when_nothing_was_put(line: QueuePair) -> None:
    assert line.inbound.take(0) is None
    assert line.inbound.take(0.02) is None


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payloads=st.lists(trees, min_size=1, max_size=5))
def test_every_payload_comes_as_it_was(make: MakeLine, payloads: list[Any]) -> None:
    line = make()
    for number, payload in enumerate(payloads):
        line.outbound.put(line.message(number, (payload,)))
    assert [bits(line.take().payload) for _ in payloads] == [bits((payload,)) for payload in payloads]


@pytest.mark.parametrize("elements", [0, 1, 2**16 - 1, 2**16, 2**20])
def test_tensors_of_every_size_come_whole(line: QueuePair, elements: int) -> None:
    payloads = [torch.randn(elements) for _ in range(4)]
    for number, payload in enumerate(payloads):
        line.outbound.put(line.message(number, payload))
    assert all(torch.equal(line.take().payload, payload) for payload in payloads)


def test_a_log_may_begin_at_any_step(line: QueuePair) -> None:
    line.inbound.rewind(3)
    line.put(12, 13)
    assert line.take_numbers(2) == [12, 13]


def test_the_same_message_put_twice_is_one(line: QueuePair) -> None:
    line.put(0, 0, 1, 0, 1, 2)
    assert line.take_numbers(3) == [0, 1, 2]
    assert line.inbound.take(0.02) is None


def test_the_same_message_from_a_later_incarnation_is_one(line: QueuePair) -> None:
    line.outbound.put(line.message(0))
    line.outbound.put(line.message(0, incarnation=9))
    assert line.outbound.depth().retained == 1


@pytest.mark.parametrize("other", [torch.zeros(3) - 0.0, torch.zeros(1), torch.zeros(3, dtype=torch.float64), (), 0])
def test_the_same_message_with_other_bits_is_a_disagreement(line: QueuePair, other: Any) -> None:
    line.outbound.put(line.message(0, -torch.zeros(3)))
    with pytest.raises(Disagreement, match=r"message 0 of forward-1 \(step 0, microbatch 0\)"):
        line.outbound.put(line.message(0, other))


def test_a_skipped_number_is_a_gap(line: QueuePair) -> None:
    line.put(0, 1)
    with pytest.raises(QueueGap, match=r"message 3 of forward-1 .* where number 2 comes next"):
        line.put(3)
    line.put(2)
    assert line.take_numbers(3) == [0, 1, 2]


def test_a_log_begins_with_a_whole_step(line: QueuePair) -> None:
    with pytest.raises(QueueGap):
        line.put(6)


@pytest.mark.parametrize("wrong", [{"run": "another"}, {"queue": "forward-2"}, {"queue": "backward-1"}], ids=str)
def test_a_message_of_another_queue_is_refused(line: QueuePair, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="was put"):
        line.outbound.put(line.message(0, **wrong))


def test_a_rewind_delivers_the_same_bits_again(line: QueuePair) -> None:
    payloads = [torch.randn(5) for _ in range(12)]
    for number, payload in enumerate(payloads):
        line.outbound.put(line.message(number, payload))
    line.take_numbers(10)
    line.inbound.rewind(1)
    assert all(torch.equal(line.take().payload, payload) for payload in payloads[4:])


def test_a_rewind_may_come_at_any_moment(line: QueuePair) -> None:
    line.put(*range(16))
    for step in [2, 0, 3, 1, 0]:
        line.take()
        line.inbound.rewind(step)
        assert line.take_numbers(3) == [4 * step, 4 * step + 1, 4 * step + 2]


def test_a_trim_forgets_what_is_before_its_step(line: QueuePair) -> None:
    line.put(*range(10))
    line.take_numbers(9)
    line.outbound.trim(2)
    assert [message.number for message in line.outbound.peek(10)] == [8, 9]
    assert line.outbound.depth().retained == 2
    assert line.take().number == 9


def test_a_trim_beyond_the_end_goes_on_from_there(line: QueuePair) -> None:
    line.put(0, 1)
    line.take_numbers(2)
    line.outbound.trim(5)
    assert line.outbound.depth().retained == 0
    assert line.outbound.depth().bytes == 0
    line.inbound.rewind(5)
    line.put(*range(2, 22))
    assert line.take_numbers(2) == [20, 21]


def test_a_forgotten_message_that_is_put_again_changes_nothing(line: QueuePair) -> None:
    line.put(0, 1, 2, 3, 4)
    line.take_numbers(5)
    line.outbound.trim(1)
    line.put(2, 3, 4, 5)
    assert line.outbound.depth().retained == 2
    assert line.take().number == 5


def test_a_rewind_to_what_is_forgotten_says_so(line: QueuePair) -> None:
    line.put(*range(10))
    line.take_numbers(10)
    line.outbound.trim(2)
    line.settle()
    line.inbound.rewind(1)
    with pytest.raises(QueueGap, match=r"message 4 of forward-1 is no longer available: .* from 8 on"):
        line.take()


@pytest.mark.parametrize("of_a_step", [1, 4])
def test_a_queue_says_how_many_messages_a_step_has(make: MakeLine, of_a_step: int) -> None:
    line = make(key=queue_of("loss-1", count=of_a_step))
    line.outbound.trim(2)
    line.inbound.rewind(2)
    numbers = range(2 * of_a_step, 2 * of_a_step + 12)
    line.put(*numbers)
    assert line.take_numbers(12) == list(numbers)
    line.inbound.rewind(3)
    assert line.take().number == 3 * of_a_step
    line.outbound.trim(4)
    assert [message.number for message in line.outbound.peek(1)] == [4 * of_a_step]


def test_looking_does_not_disturb(line: QueuePair) -> None:
    line.put(*range(6))
    for taken in range(6):
        assert [message.number for message in line.outbound.peek(3)] == [0, 1, 2]
        assert line.outbound.depth().retained == 6
        assert line.take().number == taken


def test_peeked_messages_have_memory_of_their_own(line: QueuePair) -> None:
    line.put(0)
    line.outbound.peek(1)[0].payload.zero_()
    line.outbound.peek(1)[0].payload.add_(5)
    assert torch.equal(line.take().payload, line.message(0).payload)


def test_the_depth_counts_what_waits_what_is_under_way_and_what_is_kept(make: MakeLine) -> None:
    line = make(key=queue_of("forward-1", window=3))
    for number in range(10):
        line.outbound.put(line.message(number, torch.zeros(1000)))
        line.settle()
        depth = line.outbound.depth()
        assert depth.retained == number + 1
        assert depth.in_flight <= 3
        assert depth.retained - 3 <= depth.ready + depth.in_flight <= depth.retained  # 3 may be known to be there
        assert depth.bytes >= 4000 * depth.retained
    line.take_numbers(10)
    line.settle()
    depth = line.outbound.depth()
    assert (depth.ready, depth.retained) == (0, 10)
    assert 0 < depth.oldest < 100


def test_what_is_retained_is_looked_at_from_another_thread(line: QueuePair) -> None:
    line.put(*range(6))
    line.outbound.trim(1)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: line.outbound.held).result(60) == range(4, 6)
        looks = list(other.map(line.outbound.look, range(8), timeout=60))
    assert [number for number, look in enumerate(looks) if look is not None] == [4, 5]
    assert looks[4] is not None
    assert not looks[4].on_disk
    assert torch.equal(decode(looks[4].frames).payload, line.message(4).payload)
    assert line.outbound.depth().retained == 2


def test_both_ends_count_their_positions_and_what_was_put(line: QueuePair) -> None:
    line.put(*range(10))
    line.take_numbers(4)
    line.settle()
    depth, intake = line.outbound.depth(), line.inbound.intake()
    assert (depth.put, intake.taken) == (10, 4)
    assert 4 <= intake.received <= 10
    assert 4 <= depth.sent <= 10
    assert depth.put_bytes == depth.bytes > 0
    assert (depth.resent, intake.duplicates, intake.damaged, intake.lost) == (0, 0, 0, 0)
    line.outbound.trim(1)
    assert line.outbound.depth().put == 10
    assert line.outbound.depth().put_bytes == depth.put_bytes > line.outbound.depth().bytes


def test_both_ends_agree_on_what_the_consumer_grants(make: MakeLine) -> None:
    line = make(key=queue_of("forward-1", window=3))
    line.put(*range(10))
    line.take_numbers(2)
    line.settle()
    assert line.outbound.depth().granted == line.inbound.intake().granted == 5


def test_a_consumer_that_begins_again_is_where_it_begins(line: QueuePair) -> None:
    line.put(*range(8))
    line.take_numbers(6)
    line.inbound.rewind(1)
    assert line.inbound.intake().taken == 4
    assert line.take_numbers(4) == [4, 5, 6, 7]
    assert line.inbound.intake().taken == 8


def test_a_write_by_the_receiver_changes_no_other_copy(line: QueuePair) -> None:
    line.put(0)
    line.take().payload.fill_(-1)
    line.inbound.rewind(0)
    assert torch.equal(line.take().payload, line.message(0).payload)


def test_a_tensor_written_to_after_it_was_put_is_found_when_its_message_is_wanted_again(line: QueuePair) -> None:
    tensor = torch.zeros(3)
    line.outbound.put(line.message(0, {"x": [tensor]}))
    line.take()
    line.settle()  # while its producer does not know that it has arrived, that would be found at once
    tensor.add_(1)
    line.inbound.rewind(0)
    if line.kept_by_server:
        assert torch.equal(line.take().payload["x"][0], torch.zeros(3))
    else:
        with pytest.raises(Overwritten, match=r"message 0 of forward-1 \(step 0, microbatch 0\).*clone"):
            line.take()


def test_a_tensor_written_to_after_it_was_put_is_found_when_its_message_is_forgotten(line: QueuePair) -> None:
    tensor = torch.zeros(4)
    line.outbound.put(line.message(0, tensor[:2]))
    line.take()
    tensor.add_(1)
    with pytest.raises(Overwritten):
        line.outbound.trim(1)


def test_a_retained_message_keeps_no_graph_alive(line: QueuePair) -> None:
    weight = torch.randn(3, requires_grad=True)
    inner = weight * 2
    watch = weakref.ref(inner)
    line.outbound.put(line.message(0, inner.exp()))
    del inner
    gc.collect()
    assert watch() is None
    assert line.take().payload.requires_grad


def test_a_tensor_of_inference_mode_can_be_put(line: QueuePair) -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    line.outbound.put(line.message(0, tensor))
    assert torch.equal(line.take().payload, tensor)


def test_a_full_queue_refuses_and_is_as_before(make: MakeLine) -> None:
    line = make(retain_bytes=5000)
    numbers = range(4)
    for number in numbers:
        line.outbound.put(line.message(number, torch.full((250,), float(number))))
    with pytest.raises(QueueFull, match=r"forward-1 retains 4 messages, \d+ bytes, until every stage is past step 0"):
        line.outbound.put(line.message(4, torch.zeros(250)))
    assert line.outbound.depth().retained == 4
    assert line.take_numbers(4) == list(numbers)
    line.outbound.trim(1)
    line.put(4)
    assert line.take().number == 4


def test_after_close_nothing_can_be_put_or_taken(line: QueuePair) -> None:
    line.put(0)
    inbound, outbound = line.inbound, line.outbound
    line.close()
    line.close()
    with pytest.raises(QueueClosed):
        outbound.put(line.message(1))
    with pytest.raises(QueueClosed):
        inbound.take(0)


def test_an_end_knows_its_queue(line: QueuePair) -> None:
    assert line.outbound.queue == line.inbound.queue == queue_of("forward-1")


def test_the_consumer_grants_a_window_beyond_what_it_has_taken(make: MakeLine) -> None:
    line = make(key=queue_of("forward-1", window=4))
    wait_for(lambda: _granted(line, 3))
    assert not line.outbound.has_credit(4, 0)
    assert not line.outbound.has_credit(4, 0.02)
    line.put(*range(4))
    assert line.take_numbers(4) == [0, 1, 2, 3]
    wait_for(lambda: _granted(line, 7))
    assert not line.outbound.has_credit(8, 0)


def test_a_message_without_credit_is_kept_and_comes_later(make: MakeLine) -> None:
    line = make(key=queue_of("forward-1", window=2))
    line.put(*range(8))
    assert line.take_numbers(8) == list(range(8))


def test_a_consumer_that_begins_again_grants_a_window_from_there(make: MakeLine) -> None:
    line = make(key=queue_of("forward-1", window=4))
    line.inbound.rewind(2)
    wait_for(lambda: _granted(line, 11))
    assert not line.outbound.has_credit(12, 0)


def _granted(line: QueuePair, number: int) -> bool | None:
    line.inbound.take(0)
    line.consumer.pump(0.01)
    return line.outbound.has_credit(number, 0.01) or None
