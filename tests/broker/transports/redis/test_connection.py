"""Which servers a run may use, and what is reported of those that it may not."""

from contextlib import ExitStack, closing

import pytest

from stageline.broker.transports.redis.answers import RedisAway, RedisUnfit
from stageline.broker.transports.redis.connection import RedisLink, check_fitness
from stageline.broker.transports.redis.units import Unit, pack
from support.proxy import Proxy
from support.queue_pair import wait_for
from support.redis_queues import acl, line_at, payloads, put_all, take_all, use, worker
from support.redis_server import RedisServer
from support.tls_proxy import CERTIFICATE, TlsProxy


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_throws_keys_away_is_refused(server: RedisServer, stack: ExitStack, policy: str) -> None:
    stack.enter_context(closing(server.client())).config_set("maxmemory-policy", policy)
    with pytest.raises(RedisUnfit, match=f"has maxmemory-policy {policy}.*CONFIG SET maxmemory-policy noeviction"):
        use(worker(stack, 1, server.url))


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


def test_a_handshake_that_is_damaged_on_its_way_is_repeated(stack: ExitStack, server: RedisServer) -> None:
    """The server refuses what it cannot read: that does not show whether the queues can be kept there."""
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


def test_answers_that_are_not_here_are_not_waited_for(stack: ExitStack, server: RedisServer) -> None:
    client = stack.enter_context(closing(server.client()))
    link = stack.enter_context(closing(RedisLink(server.url)))
    units: list[Unit] = [[(b"PING",)], [(b"SET", b"key", b"1"), (b"GET", b"key")], [(b"BLPOP", b"list", b"0")]]
    link.send(pack(units))
    wait_for(lambda: client.get("key"))
    assert link.receive_now(units) is None
    client.rpush("list", "x")
    assert wait_for(lambda: link.receive_now(units)) == [[b"PONG"], [b"OK", b"1"], [[b"list", b"x"]]]


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
