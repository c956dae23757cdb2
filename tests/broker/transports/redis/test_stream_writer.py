"""Requests of a producer to the server, and its conclusions from the answers."""

from collections.abc import Sequence

import hiredis
import pytest
import torch
from structlog.testing import capture_logs

from stageline.broker.codec.message import Message
from stageline.broker.errors import Disagreement
from stageline.broker.queues.delivery import Credit, Sender
from stageline.broker.queues.log import Log, RetentionBudget
from stageline.broker.transports.redis.stream_writer import StreamWriter
from stageline.broker.transports.redis.units import Exchange
from support.queue_pair import queue_of

KEY = queue_of("forward-1", count=2)


class StreamServer:
    """The streams of a server, as far as a writer uses them."""

    def __init__(self) -> None:
        self.streams: dict[bytes, list[tuple[bytes, list[bytes]]]] = {}

    def carry_out(self, exchange: Exchange) -> list[object]:
        exchange = exchange.made()
        commands = exchange.unit if exchange.packed is None else read_commands(exchange.packed)
        return [self._carry_out([bytes(argument) for argument in command]) for command in commands]

    def numbers(self, key: bytes) -> list[int]:
        return [int(entry_id.partition(b"-")[0]) for entry_id, _ in self.streams.get(key, [])]

    def _carry_out(self, command: list[bytes]) -> object:
        stream = self.streams.get(command[1], [])
        match command:
            case [b"EXISTS", key]:
                return int(key in self.streams)
            case [b"XLEN", _]:
                return len(stream)
            case [b"DEL", key]:
                return int(bool(self.streams.pop(key, None)))
            case [b"XTRIM", key, b"MINID", b"=", floor]:
                self.streams[key] = [entry for entry in stream if int(entry[0].partition(b"-")[0]) >= int(floor)]
                return len(stream) - len(self.streams[key])
            case [b"XREVRANGE", _, b"+", b"-", *_]:
                return stream[-1:]
            case [b"XREVRANGE", _, number, *_]:
                return [entry for entry in stream if entry[0].startswith(number + b"-")][-1:]
            case [b"XADD", key, b"MINID", b"=", _, entry_id, *fields]:
                self.streams[key] = [(entry_id, fields)]
                return entry_id
            case [b"XADD", key, b"NOMKSTREAM", *_] if key not in self.streams:
                return None
            case [b"XADD", key, b"NOMKSTREAM", entry_id, *fields] | [b"XADD", key, entry_id, *fields]:
                self.streams.setdefault(key, []).append((entry_id, fields))
                return entry_id
        raise AssertionError(command)


def read_commands(packed: Sequence[bytes | memoryview]) -> list[list[bytes]]:
    """The commands in what is sent, without those around a transaction."""
    reader = hiredis.Reader()
    reader.feed(b"".join(packed))
    commands = list(iter(reader.gets, False))
    return commands[1:-1] if commands[0] == [b"MULTI"] and commands[-1] == [b"EXEC"] else commands


def writer(count: int, incarnation: int = 3, *, scale: float = 1.0, since: int = 0) -> StreamWriter:
    log = Log("run", KEY, RetentionBudget())
    for number in range(count):
        payload = torch.full((2,), scale * number)
        log.put(Message("run", KEY.name, number, incarnation, payload), now=0.0)
    return StreamWriter(Sender(log), incarnation, since)


def settle(end: StreamWriter, server: StreamServer) -> None:
    while exchanges := end.next_exchanges(0, idle=False):
        for exchange in exchanges:
            exchange.receive(server.carry_out(exchange))
    assert end.is_settled


def test_messages_are_added_as_far_as_the_credit_goes() -> None:
    server, end = StreamServer(), writer(6)
    settle(end, server)
    assert server.numbers(end.keys.entries) == []
    end.update(Credit(5, 1, received=0, limit=4))
    settle(end, server)
    assert server.numbers(end.keys.entries) == [0, 1, 2, 3]


def test_a_trimmed_log_trims_its_stream() -> None:
    server, end = StreamServer(), writer(4)
    end.update(Credit(5, 1, received=0, limit=9))
    settle(end, server)
    end.log.trim(1)
    settle(end, server)
    assert server.numbers(end.keys.entries) == [2, 3]


def test_what_a_predecessor_has_added_is_compared_and_not_added_again() -> None:
    server, first = StreamServer(), writer(4, incarnation=3)
    first.update(Credit(5, 1, received=0, limit=4))
    settle(first, server)
    same, other = writer(6, incarnation=4), writer(6, incarnation=4, scale=2.0)
    for replacement in (same, other):
        replacement.update(Credit(5, 1, received=0, limit=6))
    settle(same, server)
    assert server.numbers(same.keys.entries) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(Disagreement, match=r"message 1 of forward-1 .* lies in Redis with different bits"):
        settle(other, server)


@pytest.mark.parametrize("noticed_by", ["consumer", "length"])
def test_messages_that_the_server_forgot_are_added_again_and_counted(noticed_by: str) -> None:
    # Those that the consumer missed were not counted.
    server, end = StreamServer(), writer(6)
    end.update(Credit(5, 1, received=0, limit=6))
    settle(end, server)
    del server.streams[end.keys.entries][2]
    if noticed_by == "consumer":
        end.update(Credit(5, 2, received=2, limit=6, missing=2))
    else:
        for _ in range(2):  # the announcement comes first
            [check] = end.next_exchanges(0, idle=True)
            check.receive(server.carry_out(check))
    settle(end, server)
    assert server.numbers(end.keys.entries) == [0, 1, 2, 3, 4, 5]
    assert end.forgotten == 6


def test_a_process_of_an_ended_life_that_still_writes_is_logged_once_and_deleted_only_once_a_second() -> None:
    """Both deleted and added the same stream as fast as the server answered, and nothing said so."""
    server, end = StreamServer(), writer(4, incarnation=4, since=3)
    end.update(Credit(5, 1, received=0, limit=4))
    with capture_logs() as logged:
        add_former(server)  # those that the ended life has left: nothing is wrong
        settle(end, server)
        assert (server.numbers(end.keys.entries), logged) == ([0, 1, 2, 3], [])
        for _ in range(2):
            exchange_once(end, server, idle=True)  # announces what it keeps
            add_former(server)
            exchange_once(end, server, idle=True)  # notices that there are more entries,
            exchange_once(end, server, idle=False)  # and whose
            assert end.next_exchanges(0, idle=False) == []
            exchange_once(end, server, idle=True)
            settle(end, server)
            assert server.numbers(end.keys.entries) == [0, 1, 2, 3]
    (line,) = logged
    assert "forward-1" in line["reason"]


def add_former(server: StreamServer) -> None:
    """A worker of incarnation 3 has put more messages than the one of incarnation 4."""
    former = writer(6, incarnation=3)
    former.update(Credit(4, 1, received=0, limit=6))
    server.streams.clear()
    settle(former, server)


def exchange_once(end: StreamWriter, server: StreamServer, *, idle: bool) -> None:
    for exchange in end.next_exchanges(0, idle=idle):
        exchange.receive(server.carry_out(exchange))
