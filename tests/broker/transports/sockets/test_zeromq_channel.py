"""The ZeroMQ channel: hosts that cannot be reached, and peers that send too much."""

import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stageline.broker.control.channel import LARGEST_UNTRUSTED, ServerChannel
from stageline.broker.transports.base import open_client, open_server
from stageline.broker.transports.sockets import connection_rules, zeromq_channel
from support.control_channels import PATIENCE, received, send
from support.hostile import MORE, HostileClient, frame, ready


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
def test_a_name_that_cannot_be_resolved_is_known(host: str) -> None:
    with closing(open_client(f"tcp://{host}:5600")) as client:
        assert client.trouble.startswith(f"the name '{host}' in tcp://{host}:5600 cannot be resolved")


@pytest.fixture
def server() -> Iterator[ServerChannel]:
    with closing(open_server("tcp://127.0.0.1:0")) as server:
        yield server


def test_a_message_of_several_parts_is_unreadable(server: ServerChannel) -> None:
    with HostileClient(server.endpoint) as client:
        client.send(frame(b"one", MORE) + frame(b"two", MORE) + frame(b"three") + frame(b"whole"))
        assert [message for _, message in received(server, 2)] == [None, b"whole"]


def test_a_long_message_is_taken_only_from_a_trusted_peer(
    server: ServerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_rules, "UNTRUSTED_BYTES", 2**30)  # only the channel's own limit holds
    long = (LARGEST_UNTRUSTED + 1) * b"x"
    with closing(open_client(server.endpoint, keeps=True)) as client:
        send(client, long)
        [(sender, message)] = received(server)
        assert message is None
        server.trust(sender)
        send(client, long)
        assert [message for _, message in received(server)] == [long]


def test_a_turn_takes_so_many_bytes_and_the_next_takes_the_others(
    server: ServerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq_channel, "_BATCH_BYTES", 100)
    with HostileClient(server.endpoint) as client:
        client.send(5 * frame(60 * b"x"))
        counts = []
        while sum(counts) < 5:
            counts.append(len(server.receive(PATIENCE)))
    assert max(counts) <= 2


def test_a_peer_that_names_itself_as_another_gets_nothing_of_it(server: ServerChannel) -> None:
    """With ROUTER_HANDOVER it took over the other's connection, and with it what was sent to that."""
    with closing(open_client(server.endpoint, keeps=True)) as client:
        send(client, b"hello")
        [(sender, _)] = received(server)
        with HostileClient(server.endpoint, handshake=ready(sender)) as thief:
            thief.send(frame(b"I am that"))
            assert received(server, 1, patience=0.3) == []
            server.send([(sender, b"for you alone")])
            assert client.receive(PATIENCE) == b"for you alone"


def test_a_socket_file_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with closing(open_server(f"ipc://{tmp_path}/broker")):
            assert stat.S_IMODE((tmp_path / "broker").stat().st_mode) == 0o600
    finally:
        os.umask(before)
