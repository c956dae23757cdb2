"""The Redis channel: one broker per name, keys that expire, servers that are away."""

import os
import signal
import subprocess
import sys
from contextlib import closing
from time import monotonic

import pytest
from structlog.testing import capture_logs

from stageline.broker.errors import AddressUnusable, EndpointTaken
from stageline.broker.transports.base import open_client, open_server
from stageline.broker.transports.redis import channel as through_redis
from stageline.broker.transports.redis.answers import RedisUnfit
from support.control_channels import PATIENCE, received, send
from support.redis_server import RedisServer, shared_server


@pytest.fixture
def redis_url() -> str:
    return shared_server().tcp_url_of(shared_server().own_number())


def test_without_a_broker_nothing_is_sent(redis_url: str) -> None:
    with closing(open_client(redis_url)) as client:
        assert not client.send(b"hello")


def test_brokers_of_different_names_share_a_server(redis_url: str) -> None:
    with closing(open_server(f"{redis_url}#one")) as one, closing(open_server(f"{redis_url}#other")) as other:
        with closing(open_client(f"{redis_url}#other")) as client:
            send(client, b"hello")
        assert [message for _, message in received(other)] == [b"hello"]
        assert one.receive(0.01) == []


@pytest.mark.parametrize("name", ["", "#desk", "#a%20b"])
def test_every_kind_of_address_takes_a_name(name: str) -> None:
    redis, number = shared_server(), shared_server().own_number()
    for url in (redis.url_of(number), redis.tcp_url_of(number)):
        with closing(open_server(url + name)) as server, closing(open_client(url + name)) as client:
            send(client, b"hello")
            assert [message for _, message in received(server)] == [b"hello"]


def test_why_a_server_cannot_be_reached_is_known() -> None:
    with closing(open_client("redis://127.0.0.1:1/0#desk")) as client:
        assert not client.send(b"hello")
        assert "Connection refused" in client.trouble


@pytest.mark.slow
def test_the_place_of_a_killed_broker_is_free_after_its_tenure(redis_url: str) -> None:
    imports = "import sys\nfrom stageline.broker.transports.base import open_server"
    program = f"{imports}\nopen_server(sys.argv[1])\nprint(flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-c", program, redis_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        killed.stdout.readline()
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
    with closing(open_client(redis_url)) as client:
        assert client.send(b"sent to the killed one")
        with closing(open_server(redis_url)) as server:
            send(client, b"hello")
            assert [message for _, message in received(server)] == [b"hello"]


def test_a_broker_whose_place_was_taken_meanwhile_stops(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(through_redis, "_REFRESH", 0.0)
    with closing(open_server(redis_url)) as server:
        with closing(shared_server().client(int(redis_url.rpartition("/")[2]))) as client:
            client.set("stageline:{broker}:broker", "elsewhere/7/x")
        with pytest.raises(EndpointTaken, match=r"a broker \(pid 7 on host elsewhere\)"):
            server.receive(0.01)


def test_nothing_stays_on_the_server(redis_url: str) -> None:
    with closing(open_server(redis_url)) as server, closing(open_client(redis_url)) as client:
        send(client, b"hello")
        [(sender, _)] = received(server)
        server.send([(sender, b"never read")])
        send(client, b"never received")
    with closing(shared_server().client(int(redis_url.rpartition("/")[2]))) as client:
        keys = client.keys("*")
        assert keys
        assert all(0 < client.pttl(key) <= 60_000 for key in keys)


@pytest.mark.parametrize("value", [b"", b"short", b"0123456789abcdef"])
def test_a_value_that_no_client_can_have_sent_is_passed_on_as_unreadable(value: bytes, redis_url: str) -> None:
    with closing(open_server(redis_url)) as server:
        with closing(shared_server().client(int(redis_url.rpartition("/")[2]))) as client:
            client.rpush("stageline:{broker}:to-broker", value)
        assert [message for _, message in received(server)] == [None]


def test_a_server_that_goes_and_comes_back_is_waited_for() -> None:
    with RedisServer() as redis, closing(open_server(redis.url)) as server, closing(open_client(redis.url)) as client:
        send(client, b"hello")
        [(sender, _)] = received(server)
        redis.kill()
        assert server.receive(0.01) is None
        server.send([(sender, b"lost")])
        assert not client.send(b"lost")
        assert client.receive(0.01) is None
        redis.start()
        until = monotonic() + PATIENCE
        while server.receive(0.05) is None:
            assert monotonic() < until
        send(client, b"again")
        assert received(server)[-1] == (sender, b"again")


def test_a_server_that_refuses_the_password_is_named(redis_url: str) -> None:
    url = redis_url.replace("redis://", "redis://worker:wrong@")
    with (
        closing(open_client(url)) as client,
        pytest.raises(AddressUnusable, match="does not let this run in") as refused,
    ):
        client.send(b"hello")
    assert "wrong@" not in str(refused.value)
    with pytest.raises(RedisUnfit, match="does not let this run in"):
        open_server(url)


@pytest.mark.parametrize("key", ["broker", "to-broker", "full"])
def test_a_server_that_is_full_and_a_key_that_another_client_replaced_are_waited_for_and_named(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(through_redis, "_REFRESH", 0.0)
    with RedisServer() as redis, closing(open_server(redis.url)) as server, closing(open_client(redis.url)) as client:
        send(client, b"hello")
        assert [message for _, message in received(server)] == [b"hello"]
        with closing(redis.client()) as other, capture_logs() as logs:
            name = f"stageline:{{broker}}:{key}"
            if key == "full":
                other.config_set("maxmemory", 1)
            else:
                other.delete(name)
                other.hset(name, "mine", "mine")
            assert server.receive(0.01) is None
            assert not client.send(b"lost")
            assert ("its memory is full" if key == "full" else f"key {name} is a hash, not a") in str(logs[0]["reason"])
            other.config_set("maxmemory", 0)
            other.delete(name)
        until = monotonic() + PATIENCE
        while server.receive(0.05) is None:
            assert monotonic() < until
        send(client, b"again")
        assert received(server)[-1][1] == b"again"
