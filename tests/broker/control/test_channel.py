"""Messages between broker and workers, over every transport that carries them: one promise."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import monotonic

import pytest

from stageline.broker.control.channel import ClientChannel, ServerChannel
from stageline.broker.errors import EndpointTaken
from stageline.broker.transports.base import open_client, open_server
from support.control_channels import PATIENCE, at_work, received, send
from support.transports import broker_url, registered

BACKENDS = {scheme: backend for scheme, backend in registered().items() if backend.carries_control}


@pytest.fixture(params=BACKENDS)
def url(request: pytest.FixtureRequest) -> str:
    return broker_url(BACKENDS[request.param])


@pytest.fixture
def server(url: str) -> Iterator[ServerChannel]:
    with closing(open_server(url)) as server:
        yield server
    assert not Path(url.removeprefix("ipc://")).exists()


@pytest.fixture
def client(server: ServerChannel) -> Iterator[ClientChannel]:
    with closing(open_client(server.endpoint, keeps=True)) as client:
        yield client


def test_a_message_arrives_and_its_answers_reach_its_sender(server: ServerChannel, client: ClientChannel) -> None:
    send(client, b"hello")
    [(sender, message)] = received(server)
    assert message == b"hello"
    server.send([(sender, b"welcome"), (sender, b"sit down")])
    assert [client.receive(PATIENCE), client.receive(PATIENCE)] == [b"welcome", b"sit down"]


def test_messages_of_one_sender_arrive_in_order_and_whole(server: ServerChannel, client: ClientChannel) -> None:
    first, *sent = [bytes([n]) * (1 + 50_000 * n) for n in range(12)]
    send(client, first)
    [(sender, message)] = received(server)
    assert message == first
    server.trust(sender)  # else so many bytes end the connection
    for message in sent:
        send(client, message)
    assert [message for _, message in received(server, len(sent))] == sent


def test_each_client_gets_its_own_answers(server: ServerChannel) -> None:
    with (
        closing(open_client(server.endpoint, keeps=True)) as one,
        closing(open_client(server.endpoint, keeps=True)) as other,
    ):
        send(one, b"one")
        send(other, b"other")
        server.send([(sender, b"to " + (message or b"")) for sender, message in received(server, 2)])
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
    send(client, b"hello")
    [(sender, _)] = received(server)
    server.send([(b"\0gone", b"?"), (sender, b"welcome")])
    assert client.receive(PATIENCE) == b"welcome"


def test_a_client_notices_that_there_is_another_broker(url: str, server: ServerChannel, client: ClientChannel) -> None:
    send(client, b"hello")
    received(server)
    assert client.renewed()
    assert not client.renewed()
    server.close()
    with closing(open_server(server.endpoint)):
        until = monotonic() + PATIENCE
        while not client.renewed():
            assert monotonic() < until, "it has not noticed"
            client.receive(0.05)


def test_the_address_of_a_running_broker_is_taken(server: ServerChannel) -> None:
    with at_work(server), pytest.raises(EndpointTaken, match=r"in use|a broker \(pid \d+ on host .+\) is there"):
        open_server(server.endpoint)
