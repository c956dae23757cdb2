"""Workers whose server announces, or sends, more than a process has memory for."""

from contextlib import ExitStack

import pytest

from stageline.broker.codec.message import Limits
from stageline.broker.transports.redis import stream_reader
from stageline.broker.transports.redis.answers import RedisGarbled, RedisUnfit
from stageline.broker.transports.redis.sender_thread import SenderThread
from support.false_redis import FalseRedis
from support.proxy import Proxy
from support.queue_pair import KEY, wait_for
from support.redis_queues import line_at, payloads, put_all, take_all, use, worker
from support.redis_server import RedisServer, shared_server

ARRAY = b"*4294967295\r\n"  # of 34 GB
NAMED = r"Redis at redis://127.0.0.1:\d+/0 answers as .*: it announces an array of 4294967295 elements"


@pytest.mark.parametrize("command", [b"EXEC", b"XREAD"])
def test_a_server_that_goes_on_announcing_too_much_is_named_and_ends_the_worker(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, command: bytes
) -> None:
    """It ended with a MemoryError that named nothing."""
    if command == b"XREAD":  # to the sender, what else is answered would be garbled, too
        monkeypatch.setattr(SenderThread, "_take_lead", lambda thread: not thread._ends.over.wait())
    server = stack.enter_context(FalseRedis({b"XREAD": b"*-1\r\n", command: ARRAY, b"": b"+QUEUED\r\n"}))
    queues = worker(stack, 1, f"redis://127.0.0.1:{server.port}/0", patience=0.3)
    queues.inbound(KEY).rewind(0)
    trouble = wait_for(lambda: queues.trouble)
    with pytest.raises(RedisGarbled, match=NAMED) as caught:
        use(queues)
    assert trouble.reason == str(caught.value)
    assert server.connections > 2  # it was tried again


def test_what_is_no_answer_is_named_with_the_address(stack: ExitStack) -> None:
    """It was a TypeError, and named nothing."""
    server = stack.enter_context(FalseRedis({b"": b"+QUEUED\r\n", b"XREAD": b":7\r\n", b"EXEC": b"*2\r\n:1\r\n:2\r\n"}))
    queues = worker(stack, 1, f"redis://127.0.0.1:{server.port}/0")
    queues.inbound(KEY).rewind(0)
    with pytest.raises((RedisGarbled, RedisUnfit), match=r"redis://127.0.0.1:\d+/0"):
        use(queues)


@pytest.mark.parametrize("asked", [b"XREAD", b"XADD", b"INFO"])
def test_a_worker_that_is_told_of_too_much_connects_again_and_goes_on(
    stack: ExitStack, server: RedisServer, asked: bytes
) -> None:
    proxy = stack.enter_context(Proxy(f"tcp://127.0.0.1:{server.port}"))
    seen: list[bytes] = []

    def look(passing: bytes) -> bytes:
        if asked in passing and not seen:
            seen.append(passing)
            proxy.change = lie
        return passing

    def lie(passing: bytes) -> bytes:
        proxy.change = bytes
        return ARRAY + passing

    proxy.change_there = look
    line = line_at(stack, f"redis://{proxy.endpoint.removeprefix('tcp://')}/0")
    tensors = payloads(30)
    put_all(line, tensors)
    take_all(line, tensors)
    assert seen
    assert proxy.connections > 4


def test_entries_that_never_end_a_message_are_not_kept(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, hasty: None
) -> None:
    """Each was kept until the last one came, which has the header: a server could fill the memory with them."""
    monkeypatch.setattr(stream_reader, "LIMITS", Limits(message_bytes=50_000))
    database = shared_server().own_number()
    client = shared_server().client(database)
    line = line_at(stack, shared_server().url_of(database))
    for place in range(1, 7):
        client.xadd("stageline:{line-run}:forward-1", {"t": 0, "d": bytes(10_000)}, id=f"0-{place}")
    client.close()
    line.inbound.rewind(0)
    reader = line.consumer._shared.readers[0]
    wait_for(lambda: reader.receiver.failures or None)
    tensors = payloads(10)
    put_all(line, tensors)
    take_all(line, tensors)
