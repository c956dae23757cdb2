"""Views of a worker's retained messages: summaries, where that is allowed, without a disturbance of delivery."""

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stageline.broker.codec.message import Message, decode
from stageline.broker.control.answers import MessageLook, PeekFacts, TensorValues
from stageline.broker.control.peek import Peek, Peeked
from stageline.broker.queues.base import Outbound
from stageline.broker.queues.log import RetentionBudget
from stageline.broker.queues.memory import MemoryQueues
from stageline.pipeline.program import Per, Queue
from stageline.pipeline.tree import Tree
from stageline.workers.control import peeking
from stageline.workers.control.peeking import Peeker, all_withheld_by, summary, withheld_by
from support.queue_pair import queue_of
from support.small_plans import plan

RUN = "run-1"
KEY = queue_of("forward-1")
CALLS = Queue(name="call-0", producer=0, consumer=1, per=Per.CALL, window=16)


class ShownQueue:
    """A worker with the queue `key`, and what it shows of it."""

    def __init__(self, key: Queue = KEY, reason: str = "", budget: RetentionBudget | None = None) -> None:
        self.budget = budget or RetentionBudget()
        self.queues = MemoryQueues(RUN, self.budget)
        self.outbound = self.queues.outbound(key)
        self.key = key
        self.peeker = Peeker(RUN, 0, self, lambda queue: reason)  # type: ignore[arg-type]

    def opened(self, name: str) -> Outbound | None:
        return self.outbound if name == self.key.name else None

    def put(self, *payloads: Tree) -> None:
        for payload in payloads:
            self.outbound.put(Message(RUN, self.key.name, self.outbound.held.stop, 7, payload))

    def asked(self, **fields: int) -> Peeked:
        return self.peeker(Peek(5, self.key.name, **fields))

    def facts(self, **fields: int) -> PeekFacts:
        found = self.asked(**fields)
        assert (found.id, found.refusal) == (5, "")
        assert found.facts is not None
        return found.facts

    def one(self, number: int) -> MessageLook:
        (message,) = self.facts(at=number).messages
        return message


def test_a_message_is_shown_with_its_place_and_a_summary_of_its_numbers():
    shown = ShownQueue()
    shown.put(torch.zeros(2), torch.tensor([[1.0, -3.0, float("nan")], [float("inf"), 5.0, 1.0]]))
    message = shown.one(1)
    assert (message.place.number, message.place.index, message.place.microbatch) == (1, 0, 1)
    assert (message.incarnation, message.on_disk, message.damage) == (7, False, "")
    (tensor,) = message.tensors
    assert (tensor.path, tensor.dtype, tensor.shape, tensor.bytes) == ("", "float32", [2, 3], 24)
    assert tensor.values == TensorValues(least=-3.0, mean=1.0, greatest=5.0, nan=1, infinite=1)


def test_the_tensors_of_a_tree_are_named_by_their_places():
    shown = ShownQueue()
    shown.put((torch.zeros(1, dtype=torch.int64), {"mask": torch.tensor([True, False])}, None, 3))
    assert [(each.path, each.dtype) for each in shown.one(0).tensors] == [("[0]", "int64"), ("[1]['mask']", "bool")]


def test_the_newest_messages_are_shown_or_those_from_a_number_on():
    shown = ShownQueue()
    shown.put(*(torch.full((1,), float(number)) for number in range(8)))
    shown.outbound.trim(1)

    def numbers(**fields: int) -> list[int]:
        return [each.place.number for each in shown.facts(**fields).messages]

    assert numbers() == [7]
    assert numbers(count=3) == [5, 6, 7]
    assert numbers(count=99) == [4, 5, 6, 7]
    assert numbers(count=2, at=4) == [4, 5]
    assert numbers(count=3, at=2) == [4]
    assert numbers(at=8) == []
    assert (shown.facts().first, shown.facts().end) == (4, 8)


def test_nothing_is_shown_of_a_queue_that_retains_nothing():
    assert ShownQueue().facts(count=4).messages == []


def test_a_look_takes_nothing_and_changes_nothing():
    shown = ShownQueue()
    shown.put(torch.ones(3))
    before = shown.outbound.depth()
    shown.facts(count=4), shown.asked(at=0, offset=0)
    assert shown.outbound.depth().put_bytes == before.put_bytes
    message = shown.queues.inbound(KEY).take(0)
    assert message is not None
    assert torch.equal(message.payload, torch.ones(3))  # type: ignore[arg-type]


def test_a_message_on_the_disk_is_read_while_its_queue_is_locked(tmp_path: Path):
    shown = ShownQueue(budget=RetentionBudget(memory=300, disk=10_000, folder=str(tmp_path)))
    shown.put(*(torch.full((20,), float(number)) for number in range(4)))
    found: list[MessageLook] = []
    with shown.outbound._lock:  # as a thread holds it that puts
        looking = threading.Thread(target=lambda: found.append(shown.one(0)))
        looking.start()
        looking.join(60)
    assert not looking.is_alive()
    assert found[0].on_disk
    assert found[0].tensors[0].values == TensorValues(least=0.0, mean=0.0, greatest=0.0, nan=0, infinite=0)
    assert not shown.one(3).on_disk
    shown.budget.spill.close()


def test_of_a_message_on_the_disk_each_piece_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It was read whole, and stayed in memory until the last piece was given away."""
    monkeypatch.setattr(peeking, "PIECE", 50)
    shown = ShownQueue(budget=RetentionBudget(memory=300, disk=10_000, folder=str(tmp_path)))
    shown.put(*(torch.full((50,), float(number)) for number in range(2)))
    monkeypatch.setattr(shown.budget.spill, "read", lambda slot, count: [b""] if count == 1 else pytest.fail("whole"))
    content, total = b"", 1
    while len(content) < total:
        found = shown.asked(at=0, offset=len(content))
        assert 0 < len(found.piece) <= 50
        content, total = content + found.piece, sum(found.sizes)
    assert torch.equal(decode([content[: total - 200], content[total - 200 :]]).payload, torch.zeros(50))  # type: ignore[arg-type]
    shown.budget.spill.close()
    assert shown.asked(at=0, offset=0).piece == b""


@pytest.mark.parametrize("withheld", [True, False])
def test_of_messages_on_the_disk_that_are_not_looked_into_only_the_first_frame_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, withheld: bool
):
    """A look at 64 messages on the disk read all their bytes, and the worker's reports waited for it."""
    monkeypatch.setattr(peeking, "MOST_BYTES", 300)
    budget = RetentionBudget(memory=1, disk=2**20, folder=str(tmp_path))
    shown = ShownQueue(reason="rows stay here" if withheld else "", budget=budget)
    shown.put(*(torch.zeros(5000) for _ in range(4)))
    read, counts = budget.spill.read, list[object]()
    monkeypatch.setattr(budget.spill, "read", lambda slot, count: (counts.append(count), read(slot, count))[1])
    messages = shown.facts(count=4).messages
    assert counts == [1] * 4
    assert [each.tensors[0].shape for each in messages] == [[5000]] * 4
    assert all(each.bytes > 20_000 and each.on_disk and not each.damage for each in messages)
    budget.spill.close()


def test_a_message_that_was_written_to_after_it_was_put_is_shown_as_damaged():
    shown, tensor = ShownQueue(), torch.zeros(3)
    shown.put(tensor)
    tensor.add_(1)
    message = shown.one(0)
    assert "checksum" in message.damage.lower() or "crc" in message.damage.lower()
    assert message.tensors == []


@pytest.mark.parametrize("offset", [None, 0])
def test_a_message_that_is_trimmed_is_not_there(offset: int | None):
    shown = ShownQueue()
    shown.put(*(torch.zeros(1) for _ in range(4)))
    shown.outbound.trim(1)
    if offset is None:
        assert shown.facts(at=0).messages == []
    else:
        found = shown.asked(at=0, offset=offset)
        assert (found.piece, found.sizes, found.refusal) == (b"", [], "")


def test_of_messages_too_large_to_look_into_shapes_are_shown(monkeypatch):
    monkeypatch.setattr(peeking, "MOST_BYTES", 600)
    shown = ShownQueue()
    shown.put(torch.zeros(100), torch.zeros(20, 50), torch.zeros(1))
    first, second, third = shown.facts(count=3).messages
    assert first.tensors[0].values is not None
    assert (second.tensors[0].shape, second.tensors[0].values) == ([20, 50], None)
    assert third.tensors[0].values is None  # the room is used up


def test_where_content_is_withheld_shapes_are_told_and_no_bytes_given():
    shown = ShownQueue(reason="rows stay here")
    shown.put(torch.tensor([5.0]), (torch.zeros(1), torch.ones(2)))
    facts = shown.facts(count=2)
    assert facts.withheld == "rows stay here"
    assert [[tensor.shape for tensor in each.tensors] for each in facts.messages] == [[[1]], [[1], [2]]]
    assert all(tensor.values is None for each in facts.messages for tensor in each.tensors)
    refused = shown.asked(at=0, offset=0)
    assert "rows stay here" in refused.refusal
    assert (refused.piece, refused.sizes) == (b"", [])


@given(st.integers(1, 70), st.integers(0, 40))
def test_pieces_make_up_the_message(piece: int, numbers: int):
    shown = ShownQueue()
    payload = (torch.arange(numbers), torch.ones(3))
    shown.put(payload)
    content, sizes = b"", [1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peeking, "PIECE", piece)
        while len(content) < sum(sizes):
            found = shown.asked(at=0, offset=len(content))
            assert 0 < len(found.piece) <= piece
            content, sizes = content + found.piece, list(found.sizes)
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    frames = [content[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    got = decode(frames).payload
    assert isinstance(got, tuple)
    assert all(map(torch.equal, got, payload))  # type: ignore[arg-type]


def test_another_workers_queue_is_refused_and_named():
    shown = ShownQueue()
    assert "backward-0" in shown.peeker(Peek(1, "backward-0")).refusal
    assert "forward-1" in Peeker(RUN, 3, shown, lambda queue: "")(Peek(1, "forward-1")).refusal  # type: ignore[arg-type]


def test_what_goes_wrong_is_a_refusal_and_tells_no_values(monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("a secret value")

    shown = ShownQueue()
    shown.put(torch.zeros(1))
    monkeypatch.setattr(peeking, "summary", fails)
    refused = shown.asked()
    assert "RuntimeError" in refused.refusal
    assert "secret" not in refused.refusal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.uint16, torch.bool, torch.int64])
def test_numbers_of_every_type_are_summed_up(dtype: torch.dtype):
    found = summary(torch.tensor([0, 1, 1, 0]).to(dtype))
    assert found == TensorValues(least=0.0, mean=0.5, greatest=1.0, nan=0, infinite=0)


def test_a_tensor_without_numbers_has_none_and_a_complex_one_no_summary():
    assert summary(torch.zeros(0, 3)) == TensorValues(least=None, mean=None, greatest=None, nan=0, infinite=0)
    assert summary(torch.full((2,), float("nan"))) == TensorValues(
        least=None, mean=None, greatest=None, nan=2, infinite=0
    )
    assert summary(torch.zeros(2, dtype=torch.complex64)) is None


def test_a_summary_of_many_numbers_is_made_part_by_part(monkeypatch):
    monkeypatch.setattr(peeking, "_AT_ONCE", 7)
    numbers = torch.arange(100.0)
    assert summary(numbers.reshape(10, 10).t()) == TensorValues(least=0.0, mean=49.5, greatest=99.0, nan=0, infinite=0)


def test_what_a_queue_carries_is_withheld_by_keys_by_data_that_stay_and_where_a_script_calls():
    usual = withheld_by(plan(), keyed=False)
    assert usual(KEY) == ""
    assert "script" in usual(CALLS)
    assert "keys" in withheld_by(plan(), keyed=True)(KEY)
    workers = {"0": {"stages": [0, 2]}, "1": {"stages": [1]}}
    stays = plan(data__stays=[0, 2], model__cut=[2, 5], workers=workers)
    assert "stays" in withheld_by(stays, keyed=False)(KEY)
    assert all_withheld_by(plan(), keyed=False) == ""  # one script's queues do not withhold a worker's code
    assert "keys" in all_withheld_by(plan(), keyed=True)
    assert "stays" in all_withheld_by(stays, keyed=False)
