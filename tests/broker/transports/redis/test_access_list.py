"""Users of a Redis server, each with the rights of its part alone, at a real server."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError

from stageline.broker.transports.base import open_client, open_server
from stageline.broker.transports.redis.access_list import ServerUse, access_list, pattern, uses
from stageline.broker.transports.redis.store import RedisStore
from stageline.pipeline.program import Queue
from support.control_channels import said
from support.redis_server import RedisServer

QUEUES = [
    Queue(name="forward-1", producer=0, consumer=1),
    Queue(name="forward-2", producer=1, consumer=2),
    Queue(name="of-one-worker", producer=0, consumer=0),
]
USE = ServerUse("digits-*", "desk", has_queues=True, has_records=True)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        with closing(server.client()) as client:
            for line in access_list(USE, QUEUES, 3):
                client.execute_command(*line.split())
        yield server


def as_user(server: RedisServer, user: str) -> Any:
    return redis.Redis(port=server.port, username=user, password=f"PASSWORD-OF-{user}", protocol=2)


def url_as(server: RedisServer, user: str) -> str:
    return server.url.replace("://", f"://{user}:PASSWORD-OF-{user}@")


def test_there_is_a_user_for_each_part_and_a_pattern_fits_its_name_alone() -> None:
    users = [line.split()[2] for line in access_list(USE, QUEUES, 3)]
    assert users == [f"stageline-{name}" for name in ("worker-0", "worker-1", "worker-2", "broker", "command")]
    assert [*access_list(ServerUse("digits"), QUEUES, 3)] == []
    assert pattern("a*[b]") == r"a\*\[b\]"


def test_each_server_of_a_plan_gets_what_the_run_has_there() -> None:
    one, other = "redis://a:pw@one:6379/0", "redis://other:6379/0"
    assert uses("digits-*", one, f"{other}#desk", one) == {
        "redis://a@one:6379/0": ServerUse("digits-*", has_queues=True, has_records=True),
        other: ServerUse("digits-*", "desk"),
    }
    assert uses("digits-*", "tcp://10.0.0.4:0", "tcp://10.0.0.4:7000", "sqlite") == {}


@pytest.mark.parametrize(
    "command",
    [
        ("XREAD", "STREAMS", "stageline:{digits-1}:forward-2", "0"),
        ("XADD", "stageline:{digits-1}:forward-2", "*", "d", "x"),
        ("XREAD", "STREAMS", "stageline:{words-1}:forward-1", "0"),
        ("SET", "stageline:{desk}:broker", "mine"),
        ("LPOP", "stageline:{desk}:to-broker"),
        ("HGETALL", "stageline:{digits-1}:store:fact"),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("MONITOR",),
        ("CLIENT", "LIST"),
        ("CONFIG", "GET", "*"),
        ("FLUSHALL",),
        ("PUBLISH", "a", "b"),
    ],
    ids=" ".join,
)
def test_a_worker_has_no_right_to(command: tuple[str, ...], server: RedisServer) -> None:
    with closing(as_user(server, "stageline-worker-0")) as worker, pytest.raises(NoPermissionError):
        worker.execute_command(*command)


def test_a_worker_has_its_own_queues(server: RedisServer) -> None:
    with closing(as_user(server, "stageline-worker-0")) as worker:
        assert worker.execute_command("XADD", "stageline:{digits-1}:forward-1", "1-1", "d", "x") == b"1-1"
        assert worker.execute_command("XLEN", "stageline:{digits-1}:forward-1:taken") == 0


def test_a_command_reads_records_and_changes_none(server: RedisServer) -> None:
    with closing(RedisStore(url_as(server, "stageline-broker"), "digits-2")) as store:
        store.put("run", {"id": "a"})
    with closing(RedisStore(url_as(server, "stageline-command"), "digits-2", patience=0)) as store:
        assert store.load().facts == {"run": {"id": "a"}}
    with closing(as_user(server, "stageline-command")) as command, pytest.raises(NoPermissionError):
        command.hset("stageline:{digits-2}:store:fact", "run", "mine")


@pytest.mark.parametrize("user", ["stageline-worker-0", "stageline-command"])
def test_all_meet_the_broker(user: str, server: RedisServer) -> None:
    url = url_as(server, "stageline-broker") + "#desk"
    with closing(open_server(url)) as broker, closing(open_client(url_as(server, user) + "#desk")) as client:
        [(sender, message)] = said(broker, client, b"hello")
        assert message == b"hello"
        broker.send([(sender, b"welcome")])
        assert client.receive(10) == b"welcome"
