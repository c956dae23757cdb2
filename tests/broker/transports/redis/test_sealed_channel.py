"""Channels in boxes, over a wire that tests can read and change, and a clock that they set."""

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs

from stageline.broker.keys.box import BrokerBox, ClientBox
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.transports.redis.sealed_channel import (
    MOST,
    REPEAT,
    UNCLEAR,
    SealedClientChannel,
    SealedServerChannel,
)
from support.keyed import BROKER, STRANGER, WORKER, Admitted

Envelopes = Iterable[tuple[bytes, bytes]]


@dataclass
class OpenWire:
    """Wire between clients and a broker, both ends of it, and the time."""

    to_broker: deque[tuple[bytes, bytes | None]] = field(default_factory=deque)
    to_clients: dict[bytes, deque[bytes]] = field(default_factory=dict)
    seen: list[bytes] = field(default_factory=list)
    now: float = 0.0
    brokers: int = 0

    def broker(self, *admitted: KeyPair, pair: KeyPair = BROKER) -> SealedServerChannel:
        self.brokers += 1
        return SealedServerChannel(WireServer(self), BrokerBox(pair, Admitted([*admitted]), "run", os.urandom), "here")

    def client(self, pair: KeyPair = WORKER) -> SealedClientChannel:
        box = ClientBox(pair, BROKER.public, "run", os.urandom)
        return SealedClientChannel(WireClient(self, b"client %d" % len(self.to_clients)), box, lambda: self.now)


@dataclass
class WireServer:
    wire: OpenWire
    endpoint: str = "here"
    trusted: list[bytes] = field(default_factory=list)

    def receive(self, timeout: float) -> list[tuple[bytes, bytes | None]]:
        found = [*self.wire.to_broker]
        self.wire.to_broker.clear()
        return found

    def send(self, envelopes: Envelopes) -> None:
        for recipient, message in envelopes:
            self.wire.seen.append(message)
            self.wire.to_clients.setdefault(recipient, deque()).append(message)

    def trust(self, sender: bytes) -> None:
        self.trusted.append(sender)

    def key_of(self, sender: bytes) -> str:
        return ""

    def readmit(self) -> None: ...

    def close(self) -> None: ...


class WireClient:
    """A client whose time passes while it waits in vain."""

    trouble, refusal = "no trouble", "another broker's key"

    def __init__(self, wire: OpenWire, name: bytes) -> None:
        self._wire, self._name, self._known = wire, name, 0
        self._inbox = wire.to_clients.setdefault(name, deque())

    def send(self, message: bytes) -> bool:
        if self._wire.brokers:
            self._wire.seen.append(message)
            self._wire.to_broker.append((self._name, message))
        return bool(self._wire.brokers)

    def receive(self, timeout: float) -> bytes | None:
        if self._inbox:
            return self._inbox.popleft()
        self._wire.now += timeout
        return None

    def renewed(self) -> bool:
        before, self._known = self._known, self._wire.brokers
        return before != self._known

    def close(self) -> None: ...


@pytest.fixture
def wire() -> OpenWire:
    return OpenWire()


def messages(server: SealedServerChannel) -> list[bytes | None]:
    return [message for _, message in server.receive(0) or ()]


def test_a_message_waits_for_the_session_and_its_answer_comes_back(wire: OpenWire) -> None:
    server, client = wire.broker(WORKER), wire.client()
    assert client.send(b"hello from desk")
    assert client.send(b"again")
    assert messages(server) == []
    assert client.receive(0) is None
    assert client.renewed()
    assert not client.renewed()
    (sender, first), (_, second) = server.receive(0) or ()
    assert (first, second, server.key_of(sender)) == (b"hello from desk", b"again", WORKER.public.text)
    server.send([(sender, b"welcome to digits"), (b"a session of before", b"?")])
    assert client.receive(0) == b"welcome to digits"
    assert not any(word in frame for frame in wire.seen for word in (b"desk", b"digits"))


def test_without_a_broker_nothing_is_sent_and_waiting_takes_as_long_as_asked(wire: OpenWire) -> None:
    client = wire.client()
    assert not client.send(b"lost")
    assert client.receive(3.2) is None
    assert wire.now == pytest.approx(3.2)
    server = wire.broker(WORKER)
    assert client.send(b"hello")
    assert messages(server) == []
    client.receive(0)
    assert messages(server) == [b"hello"]


def test_no_more_than_so_many_messages_wait(wire: OpenWire) -> None:
    server, client = wire.broker(WORKER), wire.client()
    for number in range(MOST + 9):
        assert client.send(b"%d" % number)
    server.receive(0)
    client.receive(0)
    assert messages(server) == [b"%d" % number for number in range(9, MOST + 9)]


def test_an_opening_that_got_lost_is_sent_again(wire: OpenWire) -> None:
    server, client = wire.broker(WORKER), wire.client()
    client.send(b"hello")
    wire.to_broker.clear()
    assert client.receive(REPEAT / 2) is None
    assert not wire.to_broker
    assert client.receive(REPEAT) is None
    assert messages(server) == []
    client.receive(0)
    assert messages(server) == [b"hello"]


def test_a_broker_that_was_started_again_gets_another_session_and_nothing_of_before(wire: OpenWire) -> None:
    server, client = wire.broker(WORKER), wire.client()
    client.send(b"hello")
    server.receive(0)
    client.receive(0)
    assert messages(server) == [b"hello"]
    recorded, again = wire.seen.copy(), wire.broker(WORKER)
    wire.to_broker.extend((b"client 0", frame) for frame in recorded)
    assert set(messages(again)) <= {None}
    assert client.renewed()
    client.send(b"hello again")
    again.receive(0)
    client.receive(REPEAT)
    assert client.renewed()
    assert messages(again)[-1] == b"hello again"


def test_a_key_that_is_not_admitted_is_told_so_by_the_broker_alone(wire: OpenWire) -> None:
    server, client = wire.broker(WORKER), wire.client(STRANGER)
    client.send(b"hello")
    assert messages(server) == []
    client.receive(0)
    assert client.refusal == "not admitted"
    assert not client.send(b"hello")
    sent = len(wire.seen)
    client.receive(10)
    assert len(wire.seen) == sent


def test_what_seems_to_be_there_is_said_once_it_has_not_replied_to_several_openings(wire: OpenWire) -> None:
    server, client = wire.broker(WORKER, pair=STRANGER), wire.client()
    client.send(b"hello")
    assert client.refusal == ""
    client.receive(UNCLEAR * REPEAT)
    assert client.refusal == "another broker's key"
    assert client.trouble == "no trouble"
    assert set(messages(server)) == {None}


def test_a_key_that_is_revoked_has_no_session_once_all_were_readmitted(wire: OpenWire) -> None:
    admitted = Admitted([WORKER, STRANGER])
    wire.brokers += 1
    server = SealedServerChannel(WireServer(wire), BrokerBox(BROKER, admitted, "run", os.urandom), "here")
    clients = [wire.client(WORKER), wire.client(STRANGER)]
    for client in clients:
        client.send(b"hello")
    server.receive(0)
    for client in clients:
        client.receive(0)
    assert messages(server) == [b"hello", b"hello"]
    admitted.pairs.remove(STRANGER)
    admitted.revoked.append(STRANGER)
    server.readmit()
    for _ in range(3):
        for client in clients:
            client.send(b"on")
        found = messages(server)
        for client in clients:
            client.receive(REPEAT)
    assert found == [b"on"]
    assert [client.refusal for client in clients] == ["", "revoked"]


def test_what_is_altered_or_comes_again_is_counted_and_named_once(wire: OpenWire) -> None:
    server, client = wire.broker(WORKER), wire.client()
    client.send(b"hello")
    server.receive(0)
    client.receive(0)
    server.receive(0)
    with capture_logs() as logs:
        client.send(b"stop")
        frame = wire.seen[-1]
        wire.to_broker.extend([(b"client 0", frame), (b"client 0", frame[:-1] + b"?"), (b"another", b"x" * 99)])
        assert messages(server) == [b"stop", None, None, None]
    assert server.unopened == 3
    assert len(logs) == 1


def test_the_address_of_a_session_is_trusted_and_what_waits_is_sent_before_the_end(wire: OpenWire) -> None:
    wire.brokers += 1
    plain = WireServer(wire)
    server = SealedServerChannel(plain, BrokerBox(BROKER, Admitted(), "run", os.urandom), "here")
    client = wire.client()
    client.send(b"stop")
    server.receive(0)
    client.close()
    [(sender, message)] = server.receive(0) or ()
    assert message == b"stop"
    server.trust(sender)
    server.trust(b"a session of before")
    assert plain.trusted == [b"client 0"]
