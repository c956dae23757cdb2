"""How messages and announcements lie in Redis."""

import random
from contextlib import ExitStack, closing

import pytest
import torch

from stageline.broker.errors import BadMessage, Fenced
from stageline.broker.queues.delivery import Credit, Retention
from stageline.broker.transports.redis.entries import (
    PIECE,
    Announcer,
    EntryId,
    pour,
    read_credit,
    read_entry,
    read_retention,
)
from support.redis_queues import STREAM, line_at, payloads, put_all, take_all
from support.redis_server import shared_server


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


def announced(*numbers: int | None, incarnation: int = 4) -> list[object]:
    """The entry in the stream after an announcement."""
    announcer = Announcer(b"stream", "forward-1 is taken", incarnation)
    [_, _, _, _, _, entry_id, *fields], look = announcer.announce(*numbers)
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
