"""How messages and announcements lie in Redis, how they are added, and the digests of their steps."""

import random
from collections import deque
from contextlib import ExitStack, closing

import hiredis
import pytest
import torch

from stageline.broker.codec.message import Frame
from stageline.broker.codec.structure import FormerFingerprint, digest_of
from stageline.broker.control.messages import StepDigest
from stageline.broker.errors import BadMessage, Fenced
from stageline.broker.queues.delivery import Credit, Retention
from stageline.broker.transports.redis.entries import (
    PIECE,
    UNCOPIED,
    Addition,
    Announcer,
    EntryId,
    StepDigests,
    read_credit,
    read_entry,
    read_retention,
)
from stageline.broker.transports.redis.forms import pour
from support.queue_pair import KEY, queue_of
from support.redis_queues import STREAM, line_at, payloads, put_all, take_all
from support.redis_server import shared_server

NAME = b"stageline:{run}:forward-1"


def test_a_message_lies_under_its_number_with_its_header_last(stack: ExitStack) -> None:
    server = shared_server()
    database = server.own_number()
    line = line_at(stack, server.url_of(database))
    line.put(0, 1)
    line.take_numbers(2)
    client = stack.enter_context(closing(server.client(database)))
    entries = client.xrange(STREAM)
    assert [entry_id for entry_id, _ in entries] == [b"0-1", b"1-1"]
    assert [list(fields) for _, fields in entries] == [[b"t", b"d", b"h"]] * 2
    assert entries[1][1][b"d"] == torch.ones(3).numpy().tobytes()
    assert entries[1][1][b"h"].startswith(b"SLMG")


@pytest.mark.parametrize("nbytes", [0, 4, PIECE - 4, PIECE, PIECE + 4, 3 * PIECE])
def test_a_large_message_comes_in_pieces_and_as_a_whole(stack: ExitStack, nbytes: int) -> None:
    server = shared_server()
    database = server.own_number()
    line = line_at(stack, server.url_of(database))
    tensors = payloads(3, nbytes // 4)
    put_all(line, tensors)
    take_all(line, tensors)
    client = stack.enter_context(closing(server.client(database)))
    pieces = max(1, -(-nbytes // PIECE))
    assert client.xlen(STREAM) == 3 * pieces
    assert [len(fields) for _, fields in client.xrange(STREAM, "1", "1")] == [2] * (pieces - 1) + [3 if nbytes else 2]


def test_many_tensors_share_entries_and_come_apart_again(stack: ExitStack) -> None:
    line = line_at(stack, shared_server().own_database())
    dice = random.Random(3)
    trees = [[torch.randn(dice.choice([0, 1, 1000, 100_000, 300_000])) for _ in range(12)] for _ in range(4)]
    for number, tree in enumerate(trees):
        line.outbound.put(line.message(number, tree))
    for tree in trees:
        found = line.take().payload
        assert all(torch.equal(there, here) for there, here in zip(found, tree, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_data_is_poured_into_the_tensors_wherever_its_pieces_end(seed: int) -> None:
    dice = random.Random(seed)
    data = dice.randbytes(200)
    ends = sorted(dice.choices(range(201), k=5))
    pieces = [data[a:b] for a, b in zip([0, *ends], [*ends, 200], strict=True)]
    buffers = [bytearray(size) for size in (0, 120, 0, 50, 30, 0)]
    pour(pieces, [memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == data
    with pytest.raises(BadMessage, match="201 bytes came for tensors of 200 bytes"):
        pour([*pieces, b"!"], [memoryview(buffer) for buffer in buffers])


@pytest.mark.parametrize("raw", [None, [b"1-1"], [b"x", [b"t", b"0", b"h", b"header"]], [b"1-1", None]])
def test_an_entry_that_is_malformed_is_none(raw: object) -> None:
    assert read_entry(raw) is None


def announced(first: int, *others: int | None, incarnation: int = 4) -> list[object]:
    """The entry in the stream after an announcement."""
    announcer = Announcer(b"stream", "forward-1 is taken", incarnation)
    [_, _, _, _, _, entry_id, *fields], look = announcer.announce(first, *others)
    assert look == announcer.look
    return [entry_id, fields]


@pytest.mark.parametrize("missing", [None, 0, 7])
def test_announcements_are_read_as_they_were_made(missing: int | None) -> None:
    assert read_credit(announced(5, 9, missing)) == Credit(4, 1, 5, 9, missing)
    assert read_retention(announced(5, 9)) == (EntryId(4, 1), Retention(5, 9))


def test_no_damaged_announcement_is_accepted() -> None:
    entry_id, [says, text, check, checksum] = announced(5, 9, None)
    for damaged in ([entry_id, [says, b"5 8 -1", check, checksum]], [b"5-1", [says, text, check, checksum]]):
        with pytest.raises(BadMessage):
            read_credit(damaged)
    with pytest.raises(BadMessage):
        read_retention(announced(5, 9, None))


def test_an_announcement_that_is_not_in_the_stream_is_made_again() -> None:
    announcer = Announcer(b"stream", "forward-1 is taken", 4)
    announcer.announce(5, 9, None)
    announcer.check([[announced(5, 9, None)]])
    assert not announcer.must_announce
    announcer.check([[]])
    assert announcer.must_announce


def test_an_end_that_was_replaced_is_fenced() -> None:
    announcer = Announcer(b"stream", "forward-1 is taken", 4)
    with pytest.raises(Fenced, match="forward-1 is taken by incarnation 6 now; this worker is incarnation 4"):
        announcer.check([[announced(5, 9, None, incarnation=6)]])


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("sizes", [(), (0,), (4,), (0, 12, 0), (UNCOPIED,), (UNCOPIED + 1, 4), (4, PIECE // 2, 9)])
def test_a_message_is_packed_as_the_command_that_adds_it(sizes: tuple[int, ...], create: bool) -> None:
    dice = random.Random(1)
    frames: list[Frame] = [dice.randbytes(150), *(memoryview(dice.randbytes(size)) for size in sizes)]
    for number in (0, 9, 10, 12345):
        [packed] = Addition(NAME).pack(number, frames, 1_700_000_000_000, create=create)
        content = [word for frame in frames[1:] if len(frame) for word in (b"d", frame)]
        begin = (b"XADD", NAME, *(() if create else (b"NOMKSTREAM",)), b"%d-1" % number, b"t", b"1700000000000")
        assert b"".join(packed) == hiredis.pack_command((*begin, *content, b"h", frames[0]))


def test_a_large_tensor_is_not_copied() -> None:
    tensor = memoryview(bytearray(UNCOPIED + 1))
    [packed] = Addition(NAME).pack(0, [b"header", tensor], 0)
    assert [chunk for chunk in packed if chunk is tensor] == [tensor]


def steps(found: deque[StepDigest]) -> list[int]:
    return [step for _, step, _ in found]


def test_both_ends_of_a_queue_give_each_whole_step_the_same_digest(stack: ExitStack) -> None:
    line = line_at(stack, shared_server().own_database())
    tensors = payloads(10)
    put_all(line, tensors)
    take_all(line, tensors)
    assert steps(line.producer.digests) == [0, 1]  # two messages of step 2 are not all
    assert list(line.producer.digests) == list(line.consumer.digests)
    assert {queue for queue, _, _ in line.consumer.digests} == {KEY.name}


def test_a_digest_tells_other_numbers_and_another_order_apart() -> None:
    found: deque[StepDigest] = deque()
    for tensors in ([1, 2], [2, 1], [1, 3]):
        end = StepDigests(queue_of("forward-1", count=2), found)
        for number, value in enumerate(tensors):
            end.add(number, value)
    assert len({digest for _, _, digest in found}) == 3


def test_messages_from_the_middle_of_a_step_on_and_without_content_have_none() -> None:
    found: deque[StepDigest] = deque()
    end = StepDigests(queue_of("forward-1", count=2), found)
    for number in (1, 2, 3, 5, 6, 8, 9):  # of step 0 the end, step 1 whole, of 2 the end, of 3 the beginning, 4 whole
        end.add(number, number)
    end.add(10, FormerFingerprint(None))
    end.add(11, 11)
    assert steps(found) == [1, 4]


def test_what_is_left_of_a_message_without_content_has_the_digest_that_it_had() -> None:
    found: deque[StepDigest] = deque()
    fingerprint = (7, "float32", (3,), (1,), False)
    end = StepDigests(queue_of("call-0", count=1), found)
    end.add(0, fingerprint)
    end.add(0, FormerFingerprint(digest_of(fingerprint)))
    assert found[0] == found[1]
