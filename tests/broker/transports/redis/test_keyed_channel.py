"""Brokers with keys at a Redis server: what the server learns, and what one who may write to it can do."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from time import monotonic

import pytest

from stageline.broker.control.channel import ClientChannel, ServerChannel
from stageline.broker.keys.admission import NotReady, ServerKeys
from stageline.broker.keys.join_line import keyed
from stageline.broker.keys.pairs import KeyPair, PublicKey
from stageline.broker.transports.base import open_client, open_server
from support.byte_tap import ByteTap, recorded
from support.control_channels import PATIENCE, at_work, said
from support.keyed import BROKER, STRANGER, WORKER, Admitted
from support.redis_server import shared_server


@pytest.fixture
def number() -> int:
    return shared_server().own_number()


@pytest.fixture
def url(number: int) -> str:
    return f"{shared_server().tcp_url_of(number)}#digits"


@contextmanager
def meeting(url: str, pair: KeyPair = WORKER) -> Iterator[tuple[ServerChannel, ClientChannel]]:
    with ExitStack() as stack:
        server = stack.enter_context(closing(open_server(url, ServerKeys(BROKER, Admitted()))))
        yield server, stack.enter_context(closing(open_client(server.endpoint, pair)))


def refusal(client: ClientChannel) -> str:
    until = monotonic() + PATIENCE
    while not client.refusal and monotonic() < until:
        client.send(b"hello")
        client.receive(0.05)
    return client.refusal


def test_the_server_learns_sizes_and_the_brokers_key_and_no_host_or_message(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "desk-of-anna")
    with ByteTap(f"tcp://127.0.0.1:{shared_server().port}", tmp_path) as tap:
        tapped = f"redis://{tap.endpoint.removeprefix('tcp://')}/{number}#digits"
        with meeting(tapped) as (server, client):
            [(sender, _)] = said(server, client, b"hello from the host desk")
            assert server.key_of(sender) == WORKER.public.text
            server.send([(sender, b"welcome to the plan")])
            assert client.receive(PATIENCE) == b"welcome to the plan"
    seen = b"".join(recorded(tmp_path))
    assert b"stageline:{digits}:to-broker" in seen
    assert f"{BROKER.public.text}/".encode() in seen
    for word in (b"hello from", b"welcome to", b"desk-of-anna", BROKER.secret, WORKER.secret):
        assert word not in seen


def test_a_client_of_the_server_that_repeats_reflects_and_forges_is_not_heard(url: str, number: int) -> None:
    with meeting(url) as (server, client), closing(shared_server().client(number)) as hostile:
        to_broker = "stageline:{digits}:to-broker"
        [(sender, _)] = said(server, client, b"hello")
        assert client.send(b"stop")
        [recorded_stop] = hostile.lrange(to_broker, 0, -1)
        name, frame = recorded_stop[:16], recorded_stop[16:]
        assert server.receive(1) == [(sender, b"stop")]
        server.send([(sender, b"answer")])
        [answer] = hostile.lrange(b"stageline:{digits}:to:" + name, 0, -1)
        forged = [recorded_stop, b"another-client-1" + frame, name + answer, name + frame[:-1], name + b"x" * 200]
        hostile.rpush(to_broker, *forged)
        hostile.rpush(b"stageline:{digits}:to:" + name, frame, answer, b"x" * 200)
        found = server.receive(1)
        assert found is not None
        assert [message for _, message in found] == [None] * len(forged)
        assert client.receive(PATIENCE) == b"answer"
        assert client.receive(0.1) is client.receive(0.1) is client.receive(0.1) is None
        assert said(server, client, b"on") == [(sender, b"on")]


@pytest.mark.slow
def test_keys_that_do_not_fit_are_told_apart(url: str) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(closing(open_server(url, ServerKeys(BROKER, Admitted()))))
        plain = stack.enter_context(closing(open_server(f"{url}-plain")))
        stack.enter_context(at_work(server))
        stack.enter_context(at_work(plain))
        for address, pair, expected in [
            (server.endpoint, STRANGER, "not admitted"),
            (keyed(url, STRANGER.public), WORKER, "another broker's key"),
            (keyed(plain.endpoint, BROKER.public), WORKER, "no keys there"),
            (url, None, "keys needed there"),
        ]:
            with closing(open_client(address, pair)) as client:
                assert refusal(client) == expected


def test_a_broker_that_does_not_know_yet_who_is_admitted_is_asked_again(url: str) -> None:
    class Starting(Admitted):
        asked = 0

        def admits(self, public: PublicKey) -> bool:
            self.asked += 1
            if self.asked == 1:
                raise NotReady
            return super().admits(public)

    with ExitStack() as stack:
        server = stack.enter_context(closing(open_server(url, ServerKeys(BROKER, Starting()))))
        client = stack.enter_context(closing(open_client(server.endpoint, WORKER)))
        assert [message for _, message in said(server, client, b"hello")] == [b"hello"]
        assert client.refusal == ""
