"""Messages between broker and workers, over every transport that carries them: one promise."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest

from stageline.broker.control.channel import ClientChannel, ServerChannel
from stageline.broker.errors import EndpointTaken
from stageline.broker.keys.admission import ServerKeys
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.transports.base import Backend, open_client, open_server
from stageline.broker.transports.redis import channel as through_redis
from support.control_channels import PATIENCE, at_work, received, said, send
from support.keyed import BROKER, WORKER, Admitted
from support.transports import broker_url, registered

BACKENDS = {scheme: backend for scheme, backend in registered().items() if backend.carries_control}


@dataclass(frozen=True)
class ControlWay:
    """A way on which clients meet their broker."""

    backend: Backend
    keys: ServerKeys | None = None
    pair: KeyPair | None = None

    def server(self, url: str) -> ServerChannel:
        return open_server(url, self.keys)

    def client(self, server: ServerChannel) -> ClientChannel:
        return open_client(server.endpoint, self.pair, keeps=True)


WAYS = {scheme: ControlWay(backend) for scheme, backend in BACKENDS.items() if scheme != "relay"}
WAYS |= {
    f"{scheme}, with keys": ControlWay(BACKENDS[scheme], ServerKeys(BROKER, Admitted()), WORKER)
    for scheme in ("tcp", "redis", "relay")
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> ControlWay:
    return WAYS[request.param]


@pytest.fixture
def url(way: ControlWay) -> str:
    return broker_url(way.backend)


@pytest.fixture
def server(way: ControlWay, url: str) -> Iterator[ServerChannel]:
    with closing(way.server(url)) as server:
        yield server
    assert not Path(url.removeprefix("ipc://")).exists()


@pytest.fixture
def client(way: ControlWay, server: ServerChannel) -> Iterator[ClientChannel]:
    with closing(way.client(server)) as client:
        yield client


def test_a_message_arrives_and_its_answers_reach_its_sender(server: ServerChannel, client: ClientChannel) -> None:
    [(sender, message)] = said(server, client, b"hello")
    assert message == b"hello"
    server.send([(sender, b"welcome"), (sender, b"sit down")])
    assert [client.receive(PATIENCE), client.receive(PATIENCE)] == [b"welcome", b"sit down"]


def test_messages_of_one_sender_arrive_in_order_and_whole(server: ServerChannel, client: ClientChannel) -> None:
    first, *sent = [bytes([n]) * (1 + 50_000 * n) for n in range(12)]
    [(sender, message)] = said(server, client, first)
    assert message == first
    server.trust(sender)  # else so many bytes end the connection
    for message in sent:
        send(client, message)
    assert [message for _, message in received(server, len(sent))] == sent


def test_each_client_gets_its_own_answers(way: ControlWay, server: ServerChannel) -> None:
    with closing(way.client(server)) as one, closing(way.client(server)) as other:
        server.send([(sender, b"to one") for sender, _ in said(server, one, b"one")])
        server.send([(sender, b"to other") for sender, _ in said(server, other, b"other")])
        assert other.receive(PATIENCE) == b"to other"
        assert one.receive(PATIENCE) == b"to one"
        assert one.receive(0.01) is None


@pytest.mark.parametrize("timeout", [0.01, 0.0])
def test_receiving_waits_no_longer_than_asked(timeout: float, server: ServerChannel, client: ClientChannel) -> None:
    """0 is no end for a Redis server: a broker that waited for its records waited for a message, too, until the
    connection counted as lost after 10 s."""
    assert server.receive(timeout) == []
    assert client.receive(timeout) is None


def test_a_recipient_that_is_gone_is_passed_over(server: ServerChannel, client: ClientChannel) -> None:
    [(sender, _)] = said(server, client, b"hello")
    server.send([(b"\0gone", b"?"), (sender, b"welcome")])
    assert client.receive(PATIENCE) == b"welcome"


def test_a_client_notices_that_there_is_another_broker(
    way: ControlWay, server: ServerChannel, client: ClientChannel
) -> None:
    said(server, client, b"hello")
    assert client.renewed()
    assert not client.renewed()
    server.close()
    with closing(way.server(server.endpoint)) as again, at_work(again):
        until = monotonic() + PATIENCE
        while not client.renewed():
            assert monotonic() < until, "it has not noticed"
            client.receive(0.05)


def test_the_address_of_a_running_broker_is_taken(
    way: ControlWay, server: ServerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(through_redis, "TENURE", 1.0)
    monkeypatch.setattr(through_redis, "_REFRESH", 0.1)
    there = rf"in use|is at the relay|a broker (\(pid \d+ on host .+\)|with the key {BROKER.public.text}) is there"
    with at_work(server), pytest.raises(EndpointTaken, match=there):
        way.server(server.endpoint)
