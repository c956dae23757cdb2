"""Sealed queues over a real server: what the server sees, and what becomes of what it changes, swaps or gives back.

What every queue promises is tested on them in tests/broker/queues/test_base.py, and with all that happens to a server
by the tests beside this one.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from stageline.broker.codec.message import Message, encode
from stageline.broker.errors import BadMessage, Disagreement
from stageline.broker.ledger.ledger import QueueDigests
from stageline.broker.queues.delivery import Credit
from stageline.broker.queues.secrets import QueueSecrets
from stageline.broker.transports.redis.answers import RedisUnfit
from stageline.broker.transports.redis.entries import PIECE, read_credit, read_retention
from stageline.broker.transports.redis.forms import PLAIN_ANNOUNCEMENT, SealedForm
from support.byte_tap import ByteTap, recorded
from support.queue_pair import BACK, KEY, RUN, QueuePair, wait_for
from support.redis_queues import STREAM, line_at, payloads, put_all, take_all, worker
from support.redis_server import shared_server
from support.sealed import sealing, sealing_since

SEALED = {"secrets": sealing_since(0)}


@pytest.fixture
def database() -> int:
    return shared_server().own_number()


@pytest.fixture
def url(database: int) -> str:
    return shared_server().url_of(database)


@pytest.fixture
def client(stack: ExitStack, database: int) -> Any:
    return stack.enter_context(closing(shared_server().client(database)))


def plain_parts(tensors: Sequence[Tensor]) -> list[bytes]:
    """Eight bytes of each quarter of the tensors, and what a header says in the clear."""
    quarters = [quarter.numpy().tobytes()[:8] for tensor in tensors for quarter in tensor.chunk(4)]
    return [*quarters, b"SLMG", b"line-run\xa9forward-1", b"a label"]


@pytest.mark.parametrize("size", [48, 300_000])
def test_nothing_of_a_message_passes_in_the_clear(stack: ExitStack, tmp_path: Path, database: int, size: int) -> None:
    server = shared_server()
    tap = stack.enter_context(ByteTap(f"tcp://127.0.0.1:{server.port}", tmp_path))
    url = f"redis://{tap.endpoint.removeprefix('tcp://')}/{database}"
    tensors = payloads(6, size)
    for terms, passes in ((SEALED, False), ({}, True)):
        with ExitStack() as ends:
            line = line_at(ends, url, **terms)
            for number, tensor in enumerate(tensors):
                line.outbound.put(line.message(number, {"a label": tensor}))
            for tensor in tensors:
                assert torch.equal(line.take().payload["a label"], tensor)
            line.outbound.trim(1)
            line.settle()
        seen = b"".join(recorded(tmp_path))
        assert len(seen) > 6 * 4 * size
        found = [part for part in plain_parts(tensors) if part in seen]
        assert found == (plain_parts(tensors) if passes else [])
        with closing(server.client(database)) as client:
            client.flushdb()


def test_what_lies_at_the_server_says_nothing_but_numbers_times_and_sizes(
    stack: ExitStack, client: Any, url: str
) -> None:
    line = line_at(stack, url, **SEALED)
    line.put(*range(5))
    line.take_numbers(5)
    line.settle()
    assert client.get("stageline:{line-run}:layout") == b"2 sealed"
    for number, (entry_id, fields) in enumerate(client.xrange(STREAM)):
        assert entry_id == b"%d-1" % number
        assert list(fields) == [b"t", b"d", b"h"]
        assert fields[b"h"].startswith(b"SLSE")
        assert len(fields[b"d"]) == 12 + 16
    for end in ("kept", "taken"):
        [(_, fields)] = client.xrange(f"{STREAM}:{end}")
        with pytest.raises(ValueError, match="invalid literal"):
            [int(number) for number in fields[b"says"].split()]


@pytest.mark.parametrize(("first", "second"), [(SEALED, {}), ({}, SEALED)])
def test_a_worker_that_seals_and_one_that_does_not_refuse_each_other(
    stack: ExitStack, url: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    assert worker(stack, 1, url, **first).flush(20)
    other = worker(stack, 2, url, **second)
    other.flush(20)
    with pytest.raises(RedisUnfit, match=r"is kept at .* in layout b'2( sealed)?', this worker uses b'2( sealed)?'"):
        other.pump(0)


@pytest.mark.parametrize("other", [partial(sealing, word=b"another"), partial(sealing, restart=0, word=b"")])
def test_a_worker_with_another_secret_reads_nothing_and_says_so(
    stack: ExitStack, hasty: None, url: str, other: Callable[..., Any]
) -> None:
    line = QueuePair(worker(stack, 1, url, **SEALED), worker(stack, 2, url, secrets=QueueSecrets(sealing_of=other)))
    line.inbound.rewind(0)
    line.put(0)
    assert line.inbound.take(0.3) is None  # it grants nothing that its producer could read


def test_messages_of_a_producer_with_another_secret_end_the_run_with_the_reason(
    stack: ExitStack, hasty: None, url: str
) -> None:
    consumer = worker(stack, 2, url, **SEALED)
    other = {"secrets": QueueSecrets(sealing_of=partial(sealing, word=b"another"))}
    forger = QueuePair(worker(stack, 1, url, **other), worker(stack, 2, url, **other))
    forger.put(0, 1)
    forger.take_numbers(2)
    forger.producer.close()
    consumer.inbound(KEY).rewind(0)
    with pytest.raises(BadMessage, match=r"message 0 of forward-1 arrived damaged 9 times.*sealed with another key"):
        wait_for(lambda: consumer.inbound(KEY).take(0.1))


def test_a_message_that_is_put_again_has_the_same_identity_and_another_ciphertext(
    stack: ExitStack, hasty: None, client: Any, url: str
) -> None:
    line = line_at(stack, url, **SEALED)
    tensors = payloads(8)
    put_all(line, tensors)
    take_all(line, tensors)
    before = client.xrange(STREAM)
    client.flushdb()
    line.inbound.rewind(0)
    take_all(line, tensors)
    after = client.xrange(STREAM)
    assert [entry_id for entry_id, _ in before] == [entry_id for entry_id, _ in after]
    for (_, one), (_, other) in zip(before, after, strict=True):
        assert one[b"d"] != other[b"d"]
        assert one[b"h"] != other[b"h"]


def test_a_replacement_compares_what_lies_there_by_the_checksums_inside(
    stack: ExitStack, client: Any, url: str
) -> None:
    line = line_at(stack, url, **SEALED)
    line.put(*range(10))
    line.take_numbers(10)
    line.producer.close()
    before = client.xrange(STREAM, "4")
    replacement = QueuePair(worker(stack, 3, url, **SEALED), line.consumer)
    for message in range(4, 12):
        replacement.outbound.put(replacement.message(message, incarnation=3))
    assert replacement.take_numbers(2) == [10, 11]
    assert client.xrange(STREAM, "4", "9") == before  # they are the same messages: nothing is added again
    other = QueuePair(worker(stack, 4, url, **SEALED), line.consumer)
    other.outbound.put(other.message(4, torch.full((3,), -4.0), incarnation=4))
    with pytest.raises(Disagreement, match=r"message 4 of forward-1 .* lies in Redis with different bits"):
        wait_for(lambda: other.producer.pump(0.01))


def replaced(client: Any, change: Callable[[list[Any]], list[Any]]) -> None:
    """Change the entries of the stream, at once: its producer looks after it."""
    entries = change(client.xrange(STREAM))
    together = client.pipeline().delete(STREAM)
    for entry_id, fields in entries:
        together.xadd(STREAM, fields, id=entry_id)
    together.execute()


def swapped_pieces(entries: list[Any]) -> list[Any]:
    (first, one), (second, other), *rest = entries
    return [(first, other), (second, one), *rest]


def fewer_pieces(entries: list[Any]) -> list[Any]:
    """The last entry, which has the header, in the second place."""
    return [entries[0], (entries[1][0], entries[2][1]), *entries[3:]]


def another_message(entries: list[Any]) -> list[Any]:
    """The second message in the place of the first, with its header."""
    return [(mine, fields) for (mine, _), (_, fields) in zip(entries[:3], entries[3:6], strict=True)] + entries[3:]


def one_bit(entries: list[Any]) -> list[Any]:
    (entry_id, fields), *rest = entries
    data = bytearray(fields[b"d"])
    data[len(data) // 2] ^= 1
    return [(entry_id, {**fields, b"d": bytes(data)}), *rest]


@pytest.mark.parametrize("change", [swapped_pieces, fewer_pieces, another_message, one_bit])
def test_what_the_server_changes_is_put_again(
    stack: ExitStack, hasty: None, client: Any, url: str, change: Callable[[list[Any]], list[Any]]
) -> None:
    line = line_at(stack, url, **SEALED)
    tensors = payloads(4, 5 * PIECE // 8)  # three pieces each
    put_all(line, tensors)
    take_all(line, tensors)
    line.settle()
    replaced(client, change)
    line.inbound.rewind(0)
    take_all(line, tensors)


def test_pieces_of_the_sealing_before_are_not_taken(stack: ExitStack, hasty: None, client: Any, url: str) -> None:
    line = line_at(stack, url, **SEALED)
    tensors = payloads(4, 5 * PIECE // 8)
    put_all(line, tensors)
    take_all(line, tensors)
    former = client.xrange(STREAM)
    client.delete(STREAM)
    line.inbound.rewind(0)
    take_all(line, tensors)
    line.settle()
    replaced(client, lambda entries: [former[0], *entries[1:]])
    line.inbound.rewind(0)
    take_all(line, tensors)


def test_no_announcement_is_believed_that_the_other_end_has_not_sealed(
    stack: ExitStack, hasty: None, client: Any, url: str
) -> None:
    """Anyone can compute a CRC-32: a forged announcement moved the credit, and let a producer start its stream over."""
    line = line_at(stack, url, **SEALED)
    line.put(*range(4))
    line.take_numbers(4)
    line.settle()
    form = SealedForm(RUN, KEY, sealing(KEY))
    [(entry_id, fields)] = client.xrange(f"{STREAM}:taken")
    raw = [entry_id, [word for pair in fields.items() for word in pair]]
    assert read_credit(raw, form.taken)[2] == 4
    forged = b"4 1000 0"
    words = [b"says", forged, b"check", b"%d" % crc32(b"9-9 " + forged)]
    assert read_credit([b"9-9", words], PLAIN_ANNOUNCEMENT) == Credit(9, 9, 4, 1000, 0)
    with pytest.raises(BadMessage, match="taken"):
        read_credit([b"9-9", words], form.taken)
    with pytest.raises(BadMessage, match="kept"):  # what the consumer has sealed, given to it as the producer's
        read_retention(raw, form.kept)
    with pytest.raises(BadMessage, match="taken"):  # of another queue between the same workers
        read_credit(raw, SealedForm(RUN, BACK, sealing(BACK)).taken)
    later = [b"2-999", [b"says", fields[b"says"], b"check", b"%d" % crc32(b"2-999 " + fields[b"says"])]]
    with pytest.raises(BadMessage, match="taken"):
        read_credit(later, form.taken)
    client.xadd(f"{STREAM}:taken", {"says": forged, "check": crc32(b"2-999 " + forged)}, id="2-999")
    line.put(*range(4, 30))
    assert line.take_numbers(26) == list(range(4, 30))
    assert client.xlen(STREAM) == 30


def test_digests_of_steps_are_equal_at_both_ends_and_tell_a_stranger_nothing(stack: ExitStack) -> None:
    digests = []
    for terms in ({}, SEALED, {"secrets": QueueSecrets(sealing_of=partial(sealing, word=b"another"))}):
        line = line_at(stack, shared_server().own_database(), **terms)
        line.put(*range(8))
        line.take_numbers(8)
        assert list(line.producer.digests) == list(line.consumer.digests)
        digests.append([digest for _, _, digest in line.producer.digests])
    assert len({digest for found in digests for digest in found}) == 6


def test_padded_messages_of_similar_sizes_lie_there_with_one_size(stack: ExitStack, client: Any, url: str) -> None:
    line = line_at(stack, url, secrets=QueueSecrets(sealing_of=sealing), is_padded=True)
    tensors = payloads(1, 250) + payloads(1, 252) + payloads(1, 256)  # 1000 to 1024 bytes
    put_all(line, tensors)
    take_all(line, tensors)
    sizes = [[len(fields[b"d"])] for _, fields in client.xrange(STREAM)]
    assert sizes[0] == sizes[1] == sizes[2]
    line.producer.rekey(QueueSecrets(sealing_of=partial(sealing, word=b"another")))  # it is padded with these, too
    client.flushdb()
    wait_for(lambda: [[len(fields[b"d"])] for _, fields in client.xrange(STREAM)] == sizes)


def test_what_is_spilled_is_what_is_kept_and_is_sealed_anew_when_it_is_put_again(
    stack: ExitStack, hasty: None, tmp_path: Path, client: Any, url: str
) -> None:
    """The disk of a worker is the worker's own: what it keeps there is not sealed with a queue's key."""
    terms = {"retain_bytes": 10_000, "spill_bytes": 10**6, "spill_folder": str(tmp_path), **SEALED}
    line = QueuePair(worker(stack, 1, url, **terms), worker(stack, 2, url, **SEALED))
    tensors = payloads(40, 700)
    put_all(line, tensors)
    take_all(line, tensors)
    client.flushdb()
    line.inbound.rewind(0)
    take_all(line, tensors)


def test_the_longest_message_fits_its_bounds_also_when_it_is_sealed() -> None:
    dice = random.Random(1)
    for size in (0, 1, PIECE, *(dice.randrange(4 * PIECE) for _ in range(5))):
        message = Message(RUN, KEY.name, 0, 1, torch.zeros(size, dtype=torch.uint8))
        frames = SealedForm(RUN, KEY, sealing(KEY, is_padded=True)).close(0, encode(message))
        assert sum(map(len, frames[1:])) <= size * 1.13 + 16 * len(frames)
    assert SealedForm.longest <= 2**32 * 1.13


# Other keys for all places, while queues are used


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1], ids=["the producer first", "the consumer first"])
def test_queues_go_on_with_other_keys_and_what_lies_at_the_server_is_sealed_with_them(
    first: int, stack: ExitStack, url: str
) -> None:
    ends = [worker(stack, 1 + place, url, **SEALED) for place in (0, 1)]
    line = QueuePair(*ends)
    line.inbound.rewind(0)
    line.put(*range(20))
    assert line.take_numbers(5) == list(range(5))
    ends[first].rekey(sealing_since(7))
    line.put(*range(20, 25))
    for _ in range(20):  # more often than a damaged message may come
        ends[first].pump(0.02)
        ends[1 - first].pump(0.02)
    ends[1 - first].rekey(sealing_since(7))
    line.put(*range(25, 30))
    assert line.take_numbers(25) == list(range(5, 30))
    late = worker(stack, 3, url, **SEALED)
    late.inbound(KEY).rewind(0)
    assert late.inbound(KEY).take(0.3) is None
    assert QueueDigests().differing([*ends[0].digests, *ends[1].digests]) is None
