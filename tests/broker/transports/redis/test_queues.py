"""Queues over a real Redis server, with everything that happens to one: cut, emptied, rolled back, full, replaced."""

import os
import random
import re
import signal
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from time import monotonic

import pytest
import torch
from msgspec.structs import replace

from stageline.broker.errors import Disagreement, Fenced, QueueFull
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.transports.redis.answers import RedisUnfit
from stageline.broker.transports.redis.queues import RedisQueues, forget
from support.fork_server import ForkServer
from support.queue_pair import KEY, QueuePair, wait_for
from support.redis_queues import STREAM, acl, line_at, payloads, producer_process, put_all, take_all, worker
from support.redis_server import RedisServer, shared_server

pytestmark = pytest.mark.usefixtures("each_form")


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


@pytest.mark.slow
def test_a_killed_producer_is_replaced_and_the_consumer_goes_on(
    stack: ExitStack, fork_server: ForkServer, server: RedisServer
) -> None:
    consumer = worker(stack, 2, server.url)
    line = QueuePair(consumer, consumer)
    with producer_process(fork_server, server.url, incarnation=1, step=0, end=2000) as process:
        taken = line.take_numbers(100)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    with producer_process(fork_server, server.url, incarnation=3, step=20, end=400):
        taken += line.take_numbers(300)
    assert taken == list(range(400))


def test_a_replacement_with_other_bits_is_found_out(stack: ExitStack) -> None:
    url = shared_server().own_database()
    line = line_at(stack, url)
    line.put(*range(8))
    line.take_numbers(8)
    line.producer.close()
    replacement = QueuePair(worker(stack, 3, url), line.consumer)
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
    replacement = QueuePair(worker(stack, 3, server.url_of(number)), line.consumer)
    for message in range(4, 12):
        replacement.outbound.put(replacement.message(message, incarnation=3))
    assert replacement.take_numbers(2) == [10, 11]
    client = stack.enter_context(closing(server.client(number)))
    assert [entry_id for entry_id, _ in client.xrange(STREAM)] == [b"%d-1" % n for n in range(4, 12)]


def test_a_replacement_takes_over_and_the_stale_consumer_is_fenced(stack: ExitStack, hasty: None) -> None:
    url = shared_server().own_database()
    old = line_at(stack, url)
    old.put(*range(30))
    assert old.take_numbers(6) == list(range(6))
    new = QueuePair(old.producer, worker(stack, 3, url))
    new.inbound.rewind(1)
    assert new.take_numbers(10) == list(range(4, 14))
    with pytest.raises(Fenced, match="forward-1 is taken by incarnation 3 now; this worker is incarnation 2"):
        old.take_numbers(30)  # it may still hold some
    assert new.take_numbers(16) == list(range(14, 30))


def test_a_stale_producer_changes_nothing(stack: ExitStack, hasty: None) -> None:
    server = shared_server()
    number = server.own_number()
    stale = line_at(stack, server.url_of(number))
    stale.put(*range(10))
    stale.take_numbers(6)
    new = QueuePair(worker(stack, 3, server.url_of(number)), stale.consumer)
    client = stack.enter_context(closing(server.client(number)))
    dice = random.Random(9)
    at = {"stale": 10, "new": 4}
    while at["new"] < 60:
        who = dice.choice([name for name, put in at.items() if put < 60])
        try:
            {"stale": stale, "new": new}[who].put(at[who])
        except Fenced:
            assert who == "stale"
        at[who] += 1
        if dice.random() < 0.1:
            client.flushdb()
    assert new.take_numbers(54) == list(range(6, 60))
    with pytest.raises(Fenced, match="forward-1 is filled by incarnation 3 now; this worker is incarnation 1"):
        wait_for(lambda: stale.producer.pump(0.01))


def test_a_user_needs_only_these_rights(stack: ExitStack, server: RedisServer, hasty: None) -> None:
    """The rules of docs/reference/redis.md."""
    page = Path("docs/reference/redis.md").read_text()
    [rules] = [line for line in page.splitlines() if line.startswith("ACL SETUSER")]
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


@pytest.mark.parametrize("key", [STREAM, f"{STREAM}:kept", f"{STREAM}:taken"])
def test_a_key_that_another_client_replaces_is_named_and_once_it_is_deleted_messages_move_again(
    stack: ExitStack, server: RedisServer, hasty: None, key: str
) -> None:
    client = stack.enter_context(closing(server.client()))
    line = line_at(stack, server.url)
    line.put(*range(10))
    assert line.take_numbers(5) == list(range(5))
    client.pipeline().delete(key).set(key, "mine").execute()
    line.put(*range(10, 15))
    named = f"key {key} is a string, not a stream: another client replaced it. Delete it, and the run goes on"
    ends = line.producer, line.consumer
    wait_for(lambda: next((end for end in ends if end.trouble and named in end.trouble.reason), None))
    client.delete(key)
    assert line.take_numbers(10) == list(range(5, 15))
    line.settle()
    assert line.producer.trouble is line.consumer.trouble is None


def test_a_key_that_stays_replaced_ends_the_run_by_its_name(stack: ExitStack, server: RedisServer, hasty: None) -> None:
    stack.enter_context(closing(server.client())).set(STREAM, "mine")
    line = line_at(stack, server.url, patience=0.3)
    line.put(0)
    with pytest.raises(RedisUnfit, match=rf"key {re.escape(STREAM)} is a string, not a stream.*; resume the run"):
        wait_for(lambda: line.producer.pump(0.01))


def test_a_queue_within_one_worker_needs_no_server(stack: ExitStack) -> None:
    server = shared_server()
    number = server.own_number()
    queues = worker(stack, 1, server.url_of(number))
    line = QueuePair(queues, queues, replace(KEY, consumer=0))
    line.put(*range(5))
    assert line.take_numbers(5) == list(range(5))
    queues.ring()
    assert line.inbound.take(10_000) is None
    assert not stack.enter_context(closing(server.client(number))).exists(STREAM)


def test_a_full_queue_within_one_worker_is_named(stack: ExitStack) -> None:
    options = {"retain_bytes": 1000, "spill_bytes": 0, "patience": 0.3}
    queues = worker(stack, 1, shared_server().own_database(), **options)
    line = QueuePair(queues, queues, replace(KEY, consumer=0))
    with pytest.raises(QueueFull, match=r"retains \d+ messages"):
        put_all(line, payloads(8, 100))


def test_what_was_spilled_to_the_disk_is_put_again(stack: ExitStack, server: RedisServer, tmp_path: Path) -> None:
    terms = {"retain_bytes": 10_000, "spill_bytes": 10**6, "spill_folder": str(tmp_path)}
    line = QueuePair(worker(stack, 1, server.url, **terms), worker(stack, 2, server.url))
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
    assert QueuePair(line.consumer, line.consumer).take_numbers(7) == list(range(1, 8))


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


def test_only_the_queues_of_the_run_that_is_named_are_forgotten(stack: ExitStack) -> None:
    server = shared_server()
    number = server.own_number()
    client = stack.enter_context(closing(server.client(number)))
    for run in ["a*", "ab"]:
        terms = QueueOptions()
        queues = stack.enter_context(closing(RedisQueues(run, 1, server.url_of(number), terms)))
        queues.inbound(KEY)
        assert queues.flush(20)
        queues.close()
    before = set(client.keys())
    forget(server.url_of(number), "a*")
    assert set(client.keys()) == {key for key in before if key.startswith(b"stageline:{ab}:")} != before


def test_a_run_that_was_resumed_as_a_whole_may_put_other_messages_than_before(stack: ExitStack, hasty: None) -> None:
    """The script of a run may call for other things when it is resumed. What it called for before lay in Redis: the
    consumer took that, and the producer was said to be not deterministic."""
    url = shared_server().own_database()
    with ExitStack() as workers:
        before = line_at(workers, url)
        before.put(*range(8))
        before.settle()
    consumer = worker(stack, 4, url, since=2)
    consumer.inbound(KEY).rewind(1)
    until = monotonic() + 0.5
    while monotonic() < until:
        assert consumer.inbound(KEY).take(0.1) is None  # though the messages of before are there
    resumed = QueuePair(worker(stack, 3, url, since=2), consumer)
    tensors = payloads(12)
    for number, tensor in enumerate(tensors, start=4):
        resumed.outbound.put(resumed.message(number, tensor, incarnation=3))
    take_all(resumed, tensors)
    resumed.settle()


def test_what_a_worker_of_before_still_adds_to_a_run_that_was_resumed_is_removed(stack: ExitStack, hasty: None) -> None:
    url = shared_server().own_database()
    before = line_at(stack, url)
    before.put(*range(4))
    assert before.take_numbers(4) == list(range(4))
    resumed = QueuePair(worker(stack, 3, url, since=2), worker(stack, 4, url, since=2))
    tensors = payloads(12)
    for number, tensor in enumerate(tensors, start=4):
        with suppress(Fenced):
            before.put(number)
        resumed.outbound.put(resumed.message(number, tensor, incarnation=3))
    resumed.inbound.rewind(1)
    take_all(resumed, tensors)
