"""A server that announces more than a process has memory for is named; nothing is allocated for it."""

import resource
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import hiredis
import pytest

from stageline.broker.control.store import StoreUnusable
from stageline.broker.transports.redis import answers as redis_sizes
from stageline.broker.transports.redis.answers import MOST_ELEMENTS, AnnouncedSizes, RedisGarbled, SizeRefused
from stageline.broker.transports.redis.channel import RedisClientChannel, RedisServerChannel
from stageline.broker.transports.redis.connection import RedisLink
from stageline.broker.transports.redis.store import RedisStore
from support.false_redis import FalseRedis

ARRAY = b"*4294967295\r\n"  # hiredis makes a list of 34 GB of it
ROOM = 2**28  # bytes that a process may take for an answer that is refused
REFUSED = {
    "array": (ARRAY, "it announces an array of 4294967295 elements; 33554432 may come"),
    "array in an array": (b"*2\r\n$1\r\na\r\n*300000000\r\n", "it announces an array of 300000000 elements"),
    "arrays together": (b"*30000000\r\n*30000000\r\n", "it announces an array of 30000000 elements"),
    "string": (b"$99999999999\r\n", "it announces a string of 99999999999 bytes; 1073741824 may come"),
    "map": (b"%4294967295\r\n", r"b'%4294967295' begins no answer in RESP 2"),
    "set": (b"~300000000\r\n", r"b'~300000000' begins no answer"),
    "push": (b">100000000\r\n", r"b'>100000000' begins no answer"),
    "attribute": (b"|300000000\r\n", r"b'\|300000000' begins no answer"),
    "verbatim string": (b"=99999999999\r\n", "begins no answer"),
    "length without a number": (b"*many\r\n", "it announces the length b'many'"),
    "line without an end": (b"-" + 2**15 * b"e", r"a line of more than 16384 bytes comes, b'-eeee"),
    "no Redis": (b"HTTP/1.1 400 Bad Request\r\n\r\n", r"b'HTTP/1.1 400 Bad Request' begins no answer"),
}


def text(content: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(content), content)


def entry(number: int, size: int) -> bytes:
    fields = [b"t", b"1763939145123", b"d", size * b"*", b"h", b"\r\n$*" * 30]
    return b"*2\r\n" + text(b"%d-1" % number) + b"*%d\r\n" % len(fields) + b"".join(map(text, fields))


ANSWERS = [
    *(b"+OK\r\n", b"+QUEUED\r\n", b":-1\r\n", b"-ERR unknown\r\n", b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"$0\r\n\r\n"),
    b"*3\r\n" + b"".join(entry(number, 50 * number) for number in range(3)),
    b"*1\r\n*2\r\n" + text(b"stageline:{run}:forward-1") + b"*1\r\n" + entry(7, 2**12),
    text(b"$99999999999\r\n*4294967295\r\n"),
    b"*12345\r\n" + 12345 * text(b"17"),
]


def check(sizes: AnnouncedSizes, stream: bytes, step: int) -> None:
    for place in range(0, len(stream), step):
        piece = stream[place : place + step]
        sizes.check(bytearray(piece), len(piece))


@contextmanager
def little_memory() -> Iterator[None]:
    """In which this process cannot take `ROOM` more."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 2**18])
def test_sound_answers_pass_in_any_pieces(step: int) -> None:
    sizes, reader = AnnouncedSizes(), hiredis.Reader(notEnoughData=AnnouncedSizes)
    for answer in ANSWERS * 2:
        check(sizes, answer, step)
        reader.feed(answer)
        assert reader.gets() is not AnnouncedSizes
        sizes.begin()
    together = b"".join(ANSWERS)
    sizes.check(together, len(together))


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("step", [3, 5, 2**18])
def test_what_is_too_large_is_refused_in_any_pieces(kind: str, step: int) -> None:
    answer, reason = REFUSED[kind]
    with pytest.raises(SizeRefused, match=reason.split(",")[0]):
        check(AnnouncedSizes(), ANSWERS[9] + answer, step)


def test_only_the_elements_of_answers_that_come_together_are_added_up() -> None:
    half = b"*%d\r\n" % (MOST_ELEMENTS // 2)
    sizes = AnnouncedSizes()
    for _ in range(3):
        sizes.check(2 * half, 2 * len(half))
        sizes.begin()
    with pytest.raises(SizeRefused):
        sizes.check(3 * half, 3 * len(half))


def test_an_answer_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_sizes, "MOST_BYTES", 2**20)
    with (
        FalseRedis({b"": b"*20000\r\n" + 20000 * text(100 * b"a")}) as server,
        closing(RedisLink(f"redis://127.0.0.1:{server.port}/0")) as link,
        pytest.raises(RedisGarbled, match="more than 1048576 bytes come in an answer"),
    ):
        link.ask(b"HGETALL", b"key")


@pytest.mark.parametrize("kind", REFUSED)
def test_a_link_names_the_address_and_what_was_announced_and_takes_no_memory_for_it(kind: str) -> None:
    answer, reason = REFUSED[kind]
    with (
        FalseRedis({b"": answer}) as server,
        closing(RedisLink(f"redis://127.0.0.1:{server.port}/0")) as link,
        little_memory(),
        pytest.raises(RedisGarbled, match=rf"Redis at redis://127.0.0.1:{server.port}/0 answers as .*{reason}"),
    ):
        link.ask(b"XREAD")


@pytest.mark.parametrize("command", [b"AUTH", b"SELECT", b"CLIENT"])
def test_the_handshake_is_measured_too(command: bytes) -> None:
    """redis-py reads it, with a parser of its own."""
    with (
        FalseRedis({command: ARRAY, b"": b"+OK\r\n"}) as server,
        closing(RedisLink(f"redis://:secret@127.0.0.1:{server.port}/3")) as link,
        little_memory(),
        pytest.raises(RedisGarbled, match=r"answers as .*it announces an array of 4294967295 elements"),
    ):
        link.ask(b"PING")


def store(url: str) -> None:
    with closing(RedisStore(url, "run", patience=0.0)) as opened:
        opened.load()


def channel(url: str) -> None:
    with closing(RedisClientChannel(url)) as opened:
        assert opened.receive(0.001) is None
        raise RedisGarbled(opened.trouble)


def server_channel(url: str) -> None:
    RedisServerChannel(url).close()


@pytest.mark.parametrize(
    ("use", "command"),
    [(store, b"GET"), (store, b"HGETALL"), (channel, b"GET"), (channel, b"BLPOP"), (server_channel, b"SET")],
)
def test_the_brokers_records_and_messages_are_measured_too(use: Callable[[str], Any], command: bytes) -> None:
    with (
        FalseRedis({command: ARRAY, b"": b"*-1\r\n"}) as server,
        little_memory(),
        pytest.raises(
            (RedisGarbled, StoreUnusable), match=r"answers as .*it announces an array of 4294967295 elements"
        ),
    ):
        use(f"redis://127.0.0.1:{server.port}/0")
