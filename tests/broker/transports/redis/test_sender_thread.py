"""Puts while the server is away, full, or has forgotten what it had."""

import random
import threading
from contextlib import ExitStack, closing

import pytest
import torch

from stageline.broker.errors import Overwritten, QueueFull
from stageline.broker.transports.redis import sender_thread
from stageline.broker.transports.redis.answers import RedisAway, RedisUnfit
from stageline.broker.transports.redis.sender_thread import SenderThread
from support.proxy import Proxy
from support.queue_pair import QueuePair, queue_of, wait_for
from support.redis_queues import STREAM, line_at, payloads, put_all, take_all, use, worker
from support.redis_server import RedisServer, shared_server

pytestmark = pytest.mark.usefixtures("each_form")


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
            assert line.take().number == number - 4


def test_a_server_that_was_rolled_back_is_filled_again(stack: ExitStack, server: RedisServer, hasty: None) -> None:
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


def test_a_server_that_begins_to_throw_keys_away_is_noticed(stack: ExitStack, server: RedisServer, hasty: None) -> None:
    line = line_at(stack, server.url)
    line.put(0)
    line.take()
    stack.enter_context(closing(server.client())).config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(RedisUnfit, match="has maxmemory-policy allkeys-lru"):
        line.take()


def test_a_full_server_is_waited_for(stack: ExitStack, server: RedisServer, hasty: None) -> None:
    client = stack.enter_context(closing(server.client()))
    line = line_at(stack, server.url, queue_of("forward-1", window=40))
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


def test_what_a_broken_connection_lost_is_sent_again_without_a_call(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was, when the next message was put, or a second later."""
    monkeypatch.setattr(sender_thread, "IDLE", 1000.0)
    proxy = stack.enter_context(Proxy(f"tcp://127.0.0.1:{shared_server().port}"))
    database = shared_server().own_number()
    producer = worker(stack, 1, f"{proxy.endpoint.replace('tcp', 'redis')}/{database}")
    line = QueuePair(producer, worker(stack, 2, shared_server().tcp_url_of(database)))
    line.put(0)
    line.take()
    line.settle()
    proxy.cut()
    line.outbound.put(line.message(1))
    message = wait_for(lambda: line.producer.pump(0.01) or line.inbound.take(0.01))  # a pump finds that it is broken
    assert message.number == 1


def test_a_run_in_another_layout_is_refused(stack: ExitStack) -> None:
    server = shared_server()
    database = server.own_number()
    stack.enter_context(closing(server.client(database))).set("stageline:{line-run}:layout", "1 4")
    queues = worker(stack, 1, server.url_of(database))
    queues.flush(20)
    with pytest.raises(RedisUnfit, match=r"is kept at .* in layout b'1 4', this worker uses b'2( sealed)?'"):
        queues.pump(0)


def test_what_a_put_is_answered_is_read_while_messages_are_waited_for(
    stack: ExitStack, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_lead, parked, over = SenderThread._take_lead, [], threading.Event()

    def parks(thread: SenderThread) -> bool:
        parked.append(thread)
        over.wait()
        return take_lead(thread)

    line = line_at(stack, shared_server().own_database())
    stack.callback(over.set)
    line.put(0)
    line.take()
    line.settle()
    monkeypatch.setattr(SenderThread, "_take_lead", parks)
    sender = line.producer._sender
    wait_for(lambda: True if sender in parked and sender._batch is None else None)
    line.put(1)
    assert sender._batch is not None
    wait_for(lambda: line.producer.pump(0.01) or (True if sender._batch is None else None))


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


def test_a_bug_in_a_thread_is_not_kept_quiet(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(SenderThread, "_next_batch", fails)
    queues = worker(stack, 1, shared_server().own_database())
    with pytest.raises(ZeroDivisionError, match="a bug"):
        queues.pump(20)
