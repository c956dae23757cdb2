"""Queues over a real Redis server, with everything that happens to one: cut, emptied, rolled back, full, replaced."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from stageline.broker.codec.message import Flow, Message
from stageline.broker.errors import BadMessage, Disagreement, Fenced, Overwritten, QueueFull, QueueGap
from stageline.broker.network import redis_connection
from stageline.broker.network.redis_connection import RedisAway, RedisLink, RedisUnfit, check_fitness
from stageline.broker.queues.base import QueueKey
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.redis import queues as queues_module
from stageline.broker.queues.redis import sender_thread as sender_module
from stageline.broker.queues.redis.entries import PIECE
from stageline.broker.queues.redis.queues import RedisQueues, forget
from support.paths import importing_tests
from support.proxy import Flip, Proxy
from support.queue_pair import KEY, RUN, QueuePair, wait_for
from support.redis_server import PROGRAMS, RedisServer, shared_server
from support.tls_proxy import CERTIFICATE, TlsProxy

BACK = QueueKey(Flow.BACKWARD, 0)
STREAM = "stageline:{line-run}:forward-1"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders that look around often, so that a test of what they then see is short."""
    monkeypatch.setattr(sender_module, "IDLE", 0.05)
    monkeypatch.setattr(sender_module, "FITNESS", 0.05)
    monkeypatch.setattr(sender_module, "LONGEST_RETRY", 0.1)


@pytest.fixture(params=PROGRAMS)
def server(request: pytest.FixtureRequest, stack: ExitStack) -> RedisServer:
    """A server of the test's own, which it may kill."""
    return stack.enter_context(RedisServer(request.param))


def worker(stack: ExitStack, incarnation: int, url: str, since: int = 0, **changed: Any) -> RedisQueues:
    terms = QueueOptions(**{"microbatches": 4, "windows": {KEY: 8, BACK: 8}, "patience": 20.0, **changed})
    return stack.enter_context(closing(RedisQueues(RUN, incarnation, url, terms, since=since)))


def use(queues: RedisQueues) -> None:
    """Until what is wrong with the server is raised."""
    wait_for(lambda: queues.pump(0.01))


def line_at(stack: ExitStack, url: str, **terms: Any) -> QueuePair:
    return QueuePair(worker(stack, 1, url, **terms), worker(stack, 2, url, **terms), 4)


@contextmanager
def producer_process(url: str, incarnation: int, step: int, end: int) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(
        [sys.executable, "-m", "support.redis_producer", url, *map(str, (incarnation, step, end))],
        env=importing_tests(),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def payloads(count: int, elements: int = 50) -> list[torch.Tensor]:
    return [torch.randn(elements) for _ in range(count)]


def put_all(line: QueuePair, tensors: list[torch.Tensor], first: int = 0) -> None:
    for number, tensor in enumerate(tensors, start=first):
        line.outbound.put(line.message(number, tensor))


def take_all(line: QueuePair, tensors: list[torch.Tensor]) -> None:
    """Takes a message for each of them, in order, and sees that it is that."""
    for tensor in tensors:
        assert torch.equal(line.take().payload, tensor)


# What lies in Redis


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


def test_a_producer_does_not_run_ahead_of_its_consumers_window(stack: ExitStack) -> None:
    server = shared_server()
    database = server.own_number()
    line = line_at(stack, server.url_of(database), windows={KEY: 3})
    line.settle()
    line.put(*range(20))
    client = stack.enter_context(closing(server.client(database)))
    lengths = []
    for number in range(20):
        assert line.take().sequence == number
        lengths.append(client.xlen(STREAM) - number)
    assert max(lengths) <= 1 + 3


def test_what_is_trimmed_is_gone_from_the_server(stack: ExitStack) -> None:
    server = shared_server()
    database = server.own_number()
    line = line_at(stack, server.url_of(database))
    line.put(*range(10))
    line.take_numbers(10)
    line.outbound.trim(2)
    line.settle()
    client = stack.enter_context(closing(server.client(database)))
    assert [entry_id for entry_id, _ in client.xrange(STREAM)] == [b"8-1", b"9-1"]


# A run that goes back


def at_step(stack: ExitStack, url: str, step: int) -> None:
    """A line whose queue is trimmed to `step`, and whose workers are gone then."""
    with ExitStack() as workers:
        line = line_at(workers, url)
        line.put(*range(4 * step + 6))
        line.take_numbers(4 * step + 4)
        line.outbound.trim(step)
        line.settle()


@pytest.mark.parametrize("first", ["producer", "consumer"])
def test_a_run_that_goes_back_finds_a_queue_that_was_trimmed_further(stack: ExitStack, hasty: None, first: str) -> None:
    """What the producer from before has said (messages from step 4 on) must not end the consumer that comes first."""
    url = shared_server().own_database()
    at_step(stack, url, 4)
    producer = worker(stack, 3, url) if first == "producer" else None
    if producer is not None:
        producer.outbound(KEY).trim(2)
    consumer = worker(stack, 4, url, since=2)
    consumer.inbound(KEY).rewind(2)
    until = monotonic() + 0.5
    while monotonic() < until:
        assert consumer.inbound(KEY).take(0.1) is None
    line = QueuePair(producer or worker(stack, 3, url), consumer, 4)
    line.outbound.trim(2)
    line.put(*range(8, 40))
    assert line.take_numbers(32) == list(range(8, 40))
    line.settle()


def test_without_going_back_a_queue_that_was_trimmed_further_is_told(stack: ExitStack, hasty: None) -> None:
    url = shared_server().own_database()
    at_step(stack, url, 4)
    consumer = worker(stack, 4, url)
    consumer.inbound(KEY).rewind(2)
    with pytest.raises(QueueGap, match="message 8 of forward-1 cannot be had any more"):
        wait_for(lambda: consumer.inbound(KEY).take(0.1))


# Connections that break


@pytest.mark.parametrize("seed", range(6))
def test_cut_answers_make_no_gap_and_no_duplicate(stack: ExitStack, hasty: None, seed: int) -> None:
    """A client that simply sends again what it got no answer to has two entries then: ids forbid that."""
    server, dice = shared_server(), random.Random(seed)
    proxy = stack.enter_context(Proxy(f"tcp://127.0.0.1:{server.port}"))
    database = server.own_number()
    cuts = []

    def cut(passing: bytes) -> bytes:
        if dice.random() > 0.15 or len(cuts) > 20:
            return passing
        proxy.cut()
        cuts.append(passing)
        return passing[: dice.randrange(len(passing))]

    url = f"redis://{proxy.endpoint.removeprefix('tcp://')}/{database}"
    line = QueuePair(worker(stack, 1, url), worker(stack, 2, url), 4)
    proxy.change = cut
    tensors = payloads(60, dice.choice([10, 5_000, 400_000]))
    for number, tensor in enumerate(tensors):
        put_all(line, [tensor], number)
        take_all(line, [tensor])
    assert cuts
    client = stack.enter_context(closing(server.client(database)))
    assert [int(entry_id.split(b"-")[0]) for entry_id, fields in client.xrange(STREAM) if b"h" in fields] == [
        *range(60)
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("direction", ["change", "change_there"])
def test_a_damaged_byte_is_never_accepted(
    stack: ExitStack, hasty: None, monkeypatch: pytest.MonkeyPatch, direction: str, seed: int
) -> None:
    monkeypatch.setattr(redis_connection, "SILENCE", 0.5)  # a damaged length can leave a connection stuck
    server, dice = shared_server(), random.Random(seed)
    proxy = stack.enter_context(Proxy(f"tcp://127.0.0.1:{server.port}"))
    url = f"redis://{proxy.endpoint.removeprefix('tcp://')}/{server.own_number()}"
    line = line_at(stack, url)
    line.put(0)
    line.take()
    flip = Flip(dice.randrange(6000), dice.randrange(8))
    setattr(proxy, direction, flip)
    tensors = payloads(30)
    put_all(line, tensors, 1)
    take_all(line, tensors)
    wait_for(lambda: flip.fired or None)


def test_a_server_that_is_gone_is_waited_for(stack: ExitStack, server: RedisServer) -> None:
    line = line_at(stack, server.url)
    line.put(*range(4))
    line.take_numbers(2)
    server.kill()
    line.put(*range(4, 20))
    wait_for(lambda: line.producer.pump(0.01) or line.producer.trouble)
    assert "cannot be reached" in line.producer.trouble.reason
    assert str(server.port) in line.producer.trouble.reason
    line.take_numbers(2)  # these were read ahead
    assert line.inbound.take(0) is None
    server.start()
    assert line.take_numbers(16) == list(range(4, 20))
    line.settle()
    assert line.producer.trouble is None


def test_a_server_that_only_starts_is_waited_for(stack: ExitStack, server: RedisServer) -> None:
    server.kill()
    starter = threading.Timer(0.5, server.start)
    starter.start()
    line = line_at(stack, server.url)
    starter.join()
    line.put(0)
    assert line.take_numbers(1) == [0]


def test_a_server_that_never_comes_is_named(stack: ExitStack, server: RedisServer) -> None:
    server.kill()
    with pytest.raises(RedisAway, match=f"Redis at redis://127.0.0.1:{server.port}/0 cannot be reached: .*refused"):
        use(worker(stack, 1, server.url, patience=0.0))


def test_a_frozen_server_holds_nobody_up(
    stack: ExitStack, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_connection, "SILENCE", 0.3)
    line = line_at(stack, server.url)
    line.put(0)
    line.take()
    server.freeze()
    line.put(*range(1, 200))
    assert line.inbound.take(0) is None
    wait_for(lambda: line.producer.pump(0.01) or line.producer.trouble)
    server.thaw()
    assert line.take_numbers(199) == list(range(1, 200))


# Servers that forget


def test_a_restarted_server_with_its_file_goes_on(stack: ExitStack, server: RedisServer) -> None:
    line = line_at(stack, server.url)
    line.put(*range(10))
    line.take_numbers(3)
    line.settle()
    server.kill()
    server.start()
    line.put(*range(10, 20))
    assert line.take_numbers(17) == list(range(3, 20))
    assert line.producer.forgotten == 0


@pytest.mark.parametrize(
    "command", ["FLUSHALL", f"DEL {STREAM}", f"XTRIM {STREAM} MAXLEN 0", f"XTRIM {STREAM} MAXLEN 1"]
)
@pytest.mark.parametrize("busy", [False, True])
def test_what_was_thrown_away_is_put_again(
    stack: ExitStack, server: RedisServer, hasty: None, command: str, busy: bool
) -> None:
    line = line_at(stack, server.url)
    line.put(*range(30))
    line.take_numbers(10)
    line.outbound.trim(1)
    line.settle()
    client = stack.enter_context(closing(server.client()))
    client.execute_command(*command.split())
    if busy:
        line.put(*range(30, 40))
    line.inbound.rewind(1)
    assert line.take_numbers(26) == list(range(4, 30))
    line.put(*range(30, 50))
    assert line.take_numbers(20) == list(range(30, 50))


def test_a_stream_that_is_flushed_again_and_again_loses_nothing(
    stack: ExitStack, server: RedisServer, hasty: None
) -> None:
    line = line_at(stack, server.url)
    client = stack.enter_context(closing(server.client()))
    dice = random.Random(5)
    for number in range(300):
        line.put(number)
        if dice.random() < 0.1:
            client.flushall()
        if number >= 4:
            assert line.take().sequence == number - 4


def test_a_server_that_was_rolled_back_is_noticed_and_filled_up(
    stack: ExitStack, server: RedisServer, hasty: None
) -> None:
    client = stack.enter_context(closing(server.client()))
    client.config_set("appendonly", "no")
    line = line_at(stack, server.url)
    line.put(*range(10))
    line.take_numbers(4)
    line.settle()
    client.save()
    line.put(*range(10, 25))
    line.take_numbers(10)
    line.settle()
    server.kill()
    server.start(appendonly="no")
    assert line.take_numbers(11) == list(range(14, 25))
    line.put(*range(25, 40))
    assert line.take_numbers(15) == list(range(25, 40))
    line.inbound.rewind(0)
    assert line.take_numbers(40) == list(range(40))
    assert line.producer.forgotten > 0


def test_a_hole_in_a_stream_is_mended(stack: ExitStack, server: RedisServer, hasty: None) -> None:
    line = line_at(stack, server.url)
    line.put(*range(12))
    line.take_numbers(12)
    line.settle()
    client = stack.enter_context(closing(server.client()))
    assert client.xdel(STREAM, "5-1", "6-1") == 2
    line.inbound.rewind(0)
    assert line.take_numbers(12) == list(range(12))


def test_a_message_damaged_at_the_server_is_mended(stack: ExitStack, server: RedisServer, hasty: None) -> None:
    line = line_at(stack, server.url)
    line.put(0)
    line.take()
    client = stack.enter_context(closing(server.client()))
    [(_, fields)] = client.xrange(STREAM)
    client.xadd(STREAM, {**fields, b"h": fields[b"h"][:-1] + b"?"}, id="1-1")
    client.xadd(STREAM, {b"alien": b"entry"}, id="2-1")
    line.put(*range(1, 8))
    assert line.take_numbers(7) == list(range(1, 8))


def test_a_message_that_stays_damaged_is_named(stack: ExitStack, server: RedisServer, hasty: None) -> None:
    consumer = worker(stack, 2, server.url)
    client = stack.enter_context(closing(server.client()))
    line = line_at(stack, server.url)
    line.put(0)
    line.take()
    [(_, fields)] = client.xrange(STREAM)
    line.producer.close()
    client.xadd(STREAM, {**fields, b"h": fields[b"h"][:-1] + b"?"}, id="1-1")
    with pytest.raises(BadMessage, match="message 1 of forward-1 arrived damaged 9 times in a row"):
        consumer.inbound(KEY).rewind(0), QueuePair(consumer, consumer, 4).take_numbers(2)


# Workers that are replaced


def test_a_killed_producer_is_replaced_and_the_consumer_goes_on(stack: ExitStack, server: RedisServer) -> None:
    consumer = worker(stack, 2, server.url)
    line = QueuePair(consumer, consumer, 4)
    with producer_process(server.url, incarnation=1, step=0, end=2000) as process:
        taken = line.take_numbers(100)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    with producer_process(server.url, incarnation=3, step=20, end=400):
        taken += line.take_numbers(300)
    assert taken == list(range(400))


def test_a_replacement_with_other_bits_is_found_out(stack: ExitStack) -> None:
    url = shared_server().own_database()
    line = line_at(stack, url)
    line.put(*range(8))
    line.take_numbers(8)
    line.producer.close()
    replacement = QueuePair(worker(stack, 3, url), line.consumer, 4)
    replacement.put(4, 5)
    replacement.outbound.put(replacement.message(6, -torch.full((3,), 6.0)))
    with pytest.raises(Disagreement, match=r"message 6 of forward-1 \(step 1, microbatch 2\) lies in Redis with diff"):
        wait_for(lambda: replacement.producer.pump(0.01))


def test_a_replacement_that_puts_the_same_again_adds_nothing(stack: ExitStack) -> None:
    server = shared_server()
    number = server.own_number()
    line = line_at(stack, server.url_of(number))
    line.put(*range(10))
    line.take_numbers(10)
    line.producer.close()
    replacement = QueuePair(worker(stack, 3, server.url_of(number)), line.consumer, 4)
    for message in range(4, 12):
        replacement.outbound.put(replacement.message(message, incarnation=3))
    assert replacement.take_numbers(2) == [10, 11]
    client = stack.enter_context(closing(server.client(number)))
    assert [entry_id for entry_id, _ in client.xrange(STREAM)] == [b"%d-1" % n for n in range(4, 12)]


def test_a_replaced_consumer_takes_over_and_its_zombie_is_told(stack: ExitStack, hasty: None) -> None:
    url = shared_server().own_database()
    old = line_at(stack, url)
    old.put(*range(30))
    assert old.take_numbers(6) == list(range(6))
    new = QueuePair(old.producer, worker(stack, 3, url), 4)
    new.inbound.rewind(1)
    assert new.take_numbers(10) == list(range(4, 14))
    with pytest.raises(Fenced, match="forward-1 is taken by incarnation 3 now; this worker is incarnation 2"):
        old.take_numbers(30)  # it may still hold some
    assert new.take_numbers(16) == list(range(14, 30))


def test_a_zombie_producer_does_no_harm(stack: ExitStack, hasty: None) -> None:
    server = shared_server()
    number = server.own_number()
    zombie = line_at(stack, server.url_of(number))
    zombie.put(*range(10))
    zombie.take_numbers(6)
    new = QueuePair(worker(stack, 3, server.url_of(number)), zombie.consumer, 4)
    client = stack.enter_context(closing(server.client(number)))
    dice = random.Random(9)
    at = {"zombie": 10, "new": 4}
    while at["new"] < 60:
        who = dice.choice([name for name, put in at.items() if put < 60])
        try:
            {"zombie": zombie, "new": new}[who].put(at[who])
        except Fenced:
            assert who == "zombie"
        at[who] += 1
        if dice.random() < 0.1:
            client.flushdb()
    assert new.take_numbers(54) == list(range(6, 60))
    with pytest.raises(Fenced, match="forward-1 is filled by incarnation 3 now; this worker is incarnation 1"):
        wait_for(lambda: zombie.producer.pump(0.01))


# Servers that cannot be used


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_throws_keys_away_is_refused(server: RedisServer, stack: ExitStack, policy: str) -> None:
    stack.enter_context(closing(server.client())).config_set("maxmemory-policy", policy)
    with pytest.raises(RedisUnfit, match=f"has maxmemory-policy {policy}.*CONFIG SET maxmemory-policy noeviction"):
        use(worker(stack, 1, server.url))


def test_a_server_that_begins_to_throw_keys_away_is_noticed(stack: ExitStack, server: RedisServer, hasty: None) -> None:
    line = line_at(stack, server.url)
    line.put(0)
    line.take()
    stack.enter_context(closing(server.client())).config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(RedisUnfit, match="has maxmemory-policy allkeys-lru"):
        line.take()


def test_a_full_server_is_waited_for(stack: ExitStack, server: RedisServer, hasty: None) -> None:
    client = stack.enter_context(closing(server.client()))
    line = line_at(stack, server.url, windows={KEY: 40})
    line.put(0)
    line.take()
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 2**22)
    tensors = payloads(30, 100_000)
    put_all(line, tensors, 1)
    wait_for(lambda: line.producer.pump(0.01) or line.producer.trouble)
    assert "refuses" in line.producer.trouble.reason
    client.config_set("maxmemory", 0)
    take_all(line, tensors)


def test_a_server_that_stays_full_ends_the_wait(stack: ExitStack, server: RedisServer, hasty: None) -> None:
    client = stack.enter_context(closing(server.client()))
    line = line_at(stack, server.url, patience=0.3)
    line.settle()
    client.config_set("maxmemory", 1)
    line.put(0)
    with pytest.raises(QueueFull, match=r"refuses: .*maxmemory.*, for 0.3 s now"):
        line.take()


def test_a_password_is_asked_for_and_checked(stack: ExitStack, server: RedisServer) -> None:
    stack.enter_context(closing(server.client())).config_set("requirepass", "open sesame")
    with pytest.raises(RedisUnfit, match=r"does not let this run in.*redis://user:password@host"):
        use(worker(stack, 1, server.url))
    wrong = server.url.replace("://", "://:wrong@")
    with pytest.raises(RedisUnfit, match="does not let this run in") as caught:
        use(worker(stack, 1, wrong))
    assert "wrong@" not in str(caught.value)
    line = line_at(stack, server.url.replace("://", "://:open%20sesame@"))
    assert "sesame" not in line.producer.endpoint
    line.put(0)
    assert line.take_numbers(1) == [0]


def acl(client: Any, *rules: str) -> None:
    client.execute_command("ACL", "SETUSER", "trainer", "reset", "on", ">secret", *rules)


def test_a_user_needs_only_these_rights(stack: ExitStack, server: RedisServer, hasty: None) -> None:
    """The rules of docs/redis.md."""
    [rules] = [line for line in Path("docs/redis.md").read_text().splitlines() if line.startswith("ACL SETUSER")]
    client = stack.enter_context(closing(server.client()))
    acl(client, *rules.split()[4:])
    line = line_at(stack, server.url.replace("://", "://trainer:secret@"))
    line.put(*range(10))
    assert line.take_numbers(10) == list(range(10))
    line.outbound.trim(2)
    client.xdel(STREAM, "9-1")
    line.inbound.rewind(2)
    assert line.take_numbers(2) == [8, 9]
    line.settle()


@pytest.mark.parametrize("missing", ["-info", "-xadd", "-xread", "-multi"])
def test_a_right_that_is_missing_is_named(stack: ExitStack, server: RedisServer, missing: str) -> None:
    acl(stack.enter_context(closing(server.client())), "~*", "+@all", missing)
    with pytest.raises(RedisUnfit, match=rf"the user of this run may not .*{missing[1:]}"):
        line_at(stack, server.url.replace("://", "://trainer:secret@")).take()


def test_tls_with_a_known_authority(stack: ExitStack, server: RedisServer) -> None:
    proxy = stack.enter_context(TlsProxy(server.port))
    line = line_at(stack, f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={CERTIFICATE}")
    tensors = payloads(10, 300_000)
    put_all(line, tensors)
    take_all(line, tensors)


def test_tls_with_an_unknown_authority_is_refused(stack: ExitStack, server: RedisServer) -> None:
    proxy = stack.enter_context(TlsProxy(server.port))
    with pytest.raises(RedisUnfit, match=r"is not trusted: .*ssl_ca_certs=/path/to/ca\.pem"):
        use(worker(stack, 1, f"rediss://127.0.0.1:{proxy.port}/0"))


@pytest.mark.parametrize("url", ["http://127.0.0.1", "redis://127.0.0.1:6379/0?colour=red", "redis://127.0.0.1:port"])
def test_an_address_that_is_none_is_named(stack: ExitStack, url: str) -> None:
    with pytest.raises(RedisUnfit, match="is not an address of a Redis server"):
        worker(stack, 1, url)


def test_a_database_that_is_not_there_is_named(stack: ExitStack, server: RedisServer) -> None:
    with pytest.raises(RedisUnfit, match="refuses the connection: DB index is out of range"):
        use(worker(stack, 1, f"redis://127.0.0.1:{server.port}/9999"))


def test_a_handshake_that_is_changed_on_its_way_is_said_again(stack: ExitStack, server: RedisServer) -> None:
    """The server refuses what it cannot read: that says nothing of whether the queues can be kept there."""
    proxy = stack.enter_context(Proxy(f"tcp://127.0.0.1:{server.port}"))
    damaged: list[bytes] = []

    def damage_the_first(passing: bytes) -> bytes:
        if damaged or b"SELECT" not in passing:
            return passing
        damaged.append(passing)
        return passing[:-1] + b"\v"

    proxy.change_there = damage_the_first
    link = stack.enter_context(closing(RedisLink(f"redis://{proxy.endpoint.removeprefix('tcp://')}/1")))
    with pytest.raises(RedisAway, match="Protocol error"):
        link.ask(b"PING")
    assert link.ask(b"PING") == b"PONG"


def test_an_old_server_is_named() -> None:
    def info(**facts: str) -> list[bytes]:
        return ["".join(f"{name}:{value}\r\n" for name, value in facts.items()).encode()]

    good = {"redis_version": "6.2.0", "maxmemory_policy": "noeviction", "aof_enabled": "1"}
    assert check_fitness("redis://a", info(**good)) == ()
    assert check_fitness("redis://a", info(**{**good, "redis_version": "10.0.1"})) == ()
    assert "no append-only file" in check_fitness("redis://a", info(**{**good, "aof_enabled": "0"}))[0]
    for version in ["6.0.16", "5.0.14", "2.8"]:
        with pytest.raises(RedisUnfit, match=f"Redis at redis://a is version {version}; queues need 6.2"):
            check_fitness("redis://a", info(**{**good, "redis_version": version}))
    with pytest.raises(RedisUnfit, match="does not answer INFO: 7"):
        check_fitness("redis://a", [7])


def test_a_key_of_somebody_else_is_named(stack: ExitStack, server: RedisServer) -> None:
    stack.enter_context(closing(server.client())).set(STREAM, "mine")
    line = line_at(stack, server.url)
    with pytest.raises(RedisUnfit, match=r"cannot be kept at .*WRONGTYPE"):
        line.take()


def test_a_worker_of_another_plan_is_refused(stack: ExitStack) -> None:
    url = shared_server().own_database()
    assert worker(stack, 1, url).flush(20)
    other = worker(stack, 2, url, microbatches=6)
    other.flush(20)
    with pytest.raises(RedisUnfit, match=r"is kept at .* in layout b'1 4', this worker uses b'1 6'"):
        other.pump(0)


# The rest


def test_a_write_to_a_tensor_before_it_was_sent_is_found(stack: ExitStack, server: RedisServer) -> None:
    line = line_at(stack, server.url)
    line.put(0)
    line.take()
    server.freeze()
    tensor = torch.zeros(3)
    line.put(1)
    line.outbound.put(line.message(2, tensor))
    tensor.add_(1)
    server.thaw()
    with pytest.raises(Overwritten, match="message 2 of forward-1"):
        wait_for(lambda: line.producer.pump(0.01))


def test_a_ring_from_another_thread_ends_a_wait(stack: ExitStack) -> None:
    queues = worker(stack, 2, shared_server().own_database())
    ringer = threading.Timer(0.05, queues.ring)
    ringer.start()
    assert queues.inbound(KEY).take(10_000) is None
    queues.ring()
    queues.pump(10_000)
    ringer.join()


def test_a_ring_from_a_signal_handler_ends_a_wait(stack: ExitStack) -> None:
    queues = worker(stack, 2, shared_server().own_database())
    before = signal.signal(signal.SIGALRM, lambda number, frame: queues.ring())
    stack.callback(signal.signal, signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    assert queues.inbound(KEY).take(10_000) is None


def test_a_ring_before_the_wait_is_not_lost_and_a_ring_after_close_is_nothing(stack: ExitStack) -> None:
    queues = worker(stack, 2, shared_server().own_database())
    for _ in range(1000):
        queues.ring()
    assert queues.inbound(KEY).take(10_000) is None
    queues.close()
    queues.ring()


def test_a_queue_within_one_worker_needs_no_server(stack: ExitStack) -> None:
    server = shared_server()
    number = server.own_number()
    queues = worker(stack, 1, server.url_of(number), local={KEY})
    line = QueuePair(queues, queues, 4)
    line.put(*range(5))
    assert line.take_numbers(5) == list(range(5))
    queues.ring()
    assert line.inbound.take(10_000) is None
    assert not stack.enter_context(closing(server.client(number))).exists(STREAM)


def test_several_queues_share_one_connection(stack: ExitStack) -> None:
    url = shared_server().own_database()
    keys = [QueueKey(flow, stage) for flow in Flow for stage in range(3)]
    windows = dict.fromkeys(keys, 3)
    producer, consumer = worker(stack, 1, url), worker(stack, 2, url, windows=windows)
    for number in range(20):
        for key in keys:
            step, microbatch = divmod(number, 4)
            payload = torch.full((4,), float(number))
            producer.outbound(key).put(Message(RUN, key.flow, step, microbatch, key.stage, 1, number, payload))
    taken: dict[QueueKey, list[int]] = {key: [] for key in keys}
    for key in random.Random(1).sample(keys * 20, len(keys) * 20):
        taken[key].append(wait_for(lambda key=key: consumer.inbound(key).take(0.1)).sequence)
    assert all(numbers == list(range(20)) for numbers in taken.values())


def test_a_full_producer_waits_says_so_and_goes_on_when_there_is_room(stack: ExitStack) -> None:
    url = shared_server().own_database()
    reasons: list[str] = []

    def waiting(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == 3:
            producer.outbound(KEY).trim(1)

    producer = worker(stack, 1, url, retain_bytes=5000, spill_bytes=0, waiting=waiting)
    line = QueuePair(producer, worker(stack, 2, url), 4)
    for number in range(5):
        line.outbound.put(line.message(number, torch.zeros(250)))
    assert len(reasons) == 3
    assert reasons[0].startswith("forward-1 retains 4 messages, ")
    line.inbound.rewind(1)
    assert line.take_numbers(1) == [4]


def test_what_was_spilled_to_the_disk_is_put_again(stack: ExitStack, server: RedisServer, tmp_path: Path) -> None:
    terms = {"retain_bytes": 10_000, "spill_bytes": 10**6, "spill_folder": str(tmp_path)}
    line = QueuePair(worker(stack, 1, server.url, **terms), worker(stack, 2, server.url), 4)
    tensors = payloads(40, 700)
    put_all(line, tensors)
    take_all(line, tensors)
    stack.enter_context(closing(server.client())).flushall()
    line.inbound.rewind(0)
    take_all(line, tensors)


def test_closing_sends_what_was_put(stack: ExitStack) -> None:
    url = shared_server().own_database()
    line = line_at(stack, url)
    line.put(0)
    line.take()
    line.put(*range(1, 8))
    line.producer.close()
    assert QueuePair(line.consumer, line.consumer, 4).take_numbers(7) == list(range(1, 8))


def test_queues_leave_nothing_open() -> None:
    def use() -> None:
        with ExitStack() as stack:
            line = line_at(stack, shared_server().own_database(), retain_bytes=100)
            line.put(0, 1, 2, 3)
            line.take_numbers(4)

    use()
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    use()
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_an_inbound_queue_needs_a_window(stack: ExitStack) -> None:
    queues = worker(stack, 1, shared_server().own_database())
    with pytest.raises(ValueError, match="no window is given for target-4; there is one for forward-1, backward-0"):
        queues.inbound(QueueKey(Flow.TARGET, 4))


def test_a_bug_in_a_thread_is_not_kept_quiet(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(queues_module.SenderThread, "_next_batch", fails)
    queues = worker(stack, 1, shared_server().own_database())
    with pytest.raises(ZeroDivisionError, match="a bug"):
        queues.pump(20)


# From outside


def test_only_the_queues_of_the_run_that_is_named_are_forgotten(stack: ExitStack) -> None:
    server = shared_server()
    number = server.own_number()
    client = stack.enter_context(closing(server.client(number)))
    for run in ["a*", "ab"]:
        terms = QueueOptions(microbatches=4, windows={KEY: 4})
        queues = stack.enter_context(closing(RedisQueues(run, 1, server.url_of(number), terms)))
        queues.inbound(KEY)
        assert queues.flush(20)
        queues.close()
    before = set(client.keys())
    forget(server.url_of(number), "a*")
    assert set(client.keys()) == {key for key in before if key.startswith(b"stageline:{ab}:")} != before
