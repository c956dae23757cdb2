"""The guard of a real socket closes the connections of hostile clients, and leaves the others alone."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from time import monotonic

import pytest
import zmq
from structlog.testing import capture_logs

from stageline.broker.transports.sockets import connection_guard, connection_rules
from stageline.broker.transports.sockets.connection_guard import ConnectionGuard
from stageline.broker.transports.sockets.curve import CurveClient, CurveServer, open_keyed, surplus
from support.hostile import (
    GREETING,
    MORE,
    HostileClient,
    endless_multipart,
    frame,
    head_of_frame,
    idle_connections,
    ready,
)
from support.keyed import BROKER, WORKER, Admitted

PATIENCE = 20.0  # seconds in which what a test waits for happens


class GuardedRouter:
    """A ROUTER with its guard, and what an owner does: takes what has come, and trusts who says "genuine"."""

    def __init__(self, context: zmq.Context, curve: CurveServer | None = None) -> None:
        self.socket = open_keyed(context, zmq.ROUTER, {zmq.MAXMSGSIZE: 2**20}, curve)
        self.guard = ConnectionGuard(context, self.socket, 2**20, surplus(curve))
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def take(self, milliseconds: int = 20) -> list[bytes]:
        """Bytes that have come, after so long at most."""
        found = []
        self.socket.poll(milliseconds)
        while self.socket.poll(0):
            self.socket.recv()
            part = self.socket.recv(copy=False)
            source = part.get(zmq.SRCFD)
            self.guard.note(source, len(part))
            if part.bytes == b"genuine":
                self.guard.trust(source)
            found.append(part.bytes)
        self.guard.drained()
        return found

    def take_until(self, done: bytes) -> None:
        until = monotonic() + PATIENCE
        while done not in self.take():
            assert monotonic() < until, f"{done!r} does not come"

    def serve_until_closed(self, client: HostileClient) -> None:
        client.socket.settimeout(0.02)
        until = monotonic() + PATIENCE
        while monotonic() < until:
            self.take()
            try:
                client.wait_until_closed()
            except TimeoutError:
                continue
            return
        raise AssertionError("the connection was not closed")

    def close(self) -> None:
        self.guard.close()
        self.socket.close(0)


@pytest.fixture
def router(stack: ExitStack) -> Iterator[GuardedRouter]:
    context = stack.enter_context(zmq.Context())
    return stack.enter_context(closing(GuardedRouter(context)))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrusted connection has little time."""
    monkeypatch.setattr(connection_rules, "UNTRUSTED_SECONDS", 0.2)


def test_an_endless_message_ends_its_connection_and_no_other(router: GuardedRouter) -> None:
    with HostileClient(router.endpoint) as friend:
        friend.send(frame(b"genuine"))
        router.take_until(b"genuine")
        assert endless_multipart(router.endpoint, most=2**30) < 2**30
        friend.send(frame(b"still here"))
        router.take_until(b"still here")


def test_the_owner_of_the_socket_may_be_busy_meanwhile(router: GuardedRouter) -> None:
    with HostileClient(router.endpoint) as client:
        assert client.flood(head_of_frame(2**19, MORE) + 2**19 * b"x", most=2**30) < 2**30


def test_a_trusted_connection_may_send_long_messages_again_and_again(router: GuardedRouter) -> None:
    with HostileClient(router.endpoint) as friend:
        friend.send(frame(b"genuine"))
        router.take_until(b"genuine")
        for n in range(40):
            friend.send(frame(2**20 * bytes([n])) + frame(b"number %d" % n))
            router.take_until(b"number %d" % n)


def test_a_trusted_connection_may_not_have_more_under_way_than_the_largest_message(router: GuardedRouter) -> None:
    with HostileClient(router.endpoint) as member:
        member.send(frame(b"genuine"))
        router.take_until(b"genuine")
        assert member.flood(64 * frame(4096 * b"x", MORE), most=2**34) < 2**34


@pytest.mark.parametrize(
    "said", [b"", GREETING[:20], GREETING, GREETING + ready(), GREETING + ready() + frame(b"not genuine")]
)
def test_who_says_nothing_genuine_in_time_is_closed(said: bytes, router: GuardedRouter, impatient: None) -> None:
    with HostileClient(router.endpoint, shaken=False) as client:
        client.send(said)
        router.serve_until_closed(client)


def test_who_has_said_something_genuine_stays(router: GuardedRouter, impatient: None) -> None:
    with HostileClient(router.endpoint) as friend, HostileClient(router.endpoint) as idler:
        friend.send(frame(b"genuine"))
        router.take_until(b"genuine")
        router.serve_until_closed(idler)
        friend.send(frame(b"still here"))
        router.take_until(b"still here")


def test_a_connection_in_place_of_a_trusted_one_is_untrusted(router: GuardedRouter, impatient: None) -> None:
    with HostileClient(router.endpoint) as friend:
        friend.send(frame(b"genuine"))
        router.take_until(b"genuine")
    with HostileClient(router.endpoint) as stranger:  # the system gives it the same descriptor
        router.serve_until_closed(stranger)


def test_idle_connections_do_not_keep_others_out(
    router: GuardedRouter, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_rules, "UNTRUSTED_CONNECTIONS", 10)
    idle_connections(router.endpoint, 60, stack)
    with HostileClient(router.endpoint) as friend:
        friend.send(frame(b"genuine"))
        router.take_until(b"genuine")


def test_each_refusal_is_logged_with_its_peer_and_reason(router: GuardedRouter, impatient: None) -> None:
    with capture_logs() as logged, HostileClient(router.endpoint) as client:
        host, port = client.socket.getsockname()
        router.serve_until_closed(client)
        router.guard.close()
    assert [(line["event"], line["peer"], line["reason"]) for line in logged] == [
        ("a connection was closed", f"{host}:{port}", "no genuine message came in 0.2 s")
    ]


@pytest.mark.parametrize("said", [GREETING[:20] + 64 * b"?", GREETING + ready() + head_of_frame(2**62)])
def test_a_connection_that_zeromq_itself_ends_is_logged(said: bytes, router: GuardedRouter) -> None:
    with capture_logs() as logged, HostileClient(router.endpoint, shaken=False) as client:
        client.send(said)
        router.serve_until_closed(client)
        router.guard.close()
    assert [line["reason"] for line in logged] == ["it ended, or was not of the protocol, and has brought no message"]


def test_the_end_of_a_connection_that_has_brought_a_message_is_not_logged(router: GuardedRouter) -> None:
    with capture_logs() as logged:
        with HostileClient(router.endpoint) as client:
            client.send(frame(b"something"))
            router.take_until(b"something")
        with HostileClient(router.endpoint, shaken=False) as stranger:
            stranger.send(GREETING[:20] + 64 * b"?")
            router.serve_until_closed(stranger)
        router.guard.close()
    assert [line["reason"] for line in logged] == ["it ended, or was not of the protocol, and has brought no message"]


@pytest.fixture
def keyed(stack: ExitStack) -> Iterator[tuple[GuardedRouter, zmq.Socket]]:
    """A router with keys, and a trusted peer's socket."""
    context = stack.enter_context(zmq.Context())
    router = stack.enter_context(closing(GuardedRouter(context, CurveServer(BROKER, Admitted()))))
    dealer = open_keyed(context, zmq.DEALER, {zmq.LINGER: 0, zmq.MAXMSGSIZE: 2**20}, CurveClient(WORKER, BROKER.public))
    with dealer:
        dealer.connect(router.endpoint)
        dealer.send(b"genuine")
        router.take_until(b"genuine")
        yield router, dealer


def test_bytes_of_encryption_are_counted_for_frames_of_every_length(
    keyed: tuple[GuardedRouter, zmq.Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encryption adds to each frame what never was delivered: so much seemed to be under way, more with each frame."""
    router, dealer = keyed
    # A busy machine may count late what was delivered, so 64 KiB may be under way.
    monkeypatch.setattr(connection_rules, "SLACK", 2**16 - 2**20)
    monkeypatch.setattr(connection_guard, "CALM", 1)
    with capture_logs() as logged:
        for n in range(3000):  # the surplus of 1,986 frames would be too much
            dealer.send((n % 600) * b"x")
            router.take_until((n % 600) * b"x")
    assert logged == []


@pytest.mark.slow
def test_a_million_requests_over_an_encrypted_connection_do_not_close_it(
    keyed: tuple[GuardedRouter, zmq.Socket],
) -> None:
    """The connection was closed after 514,600 requests."""
    router, dealer = keyed
    with capture_logs() as logged:
        for _ in range(2000):
            for _ in range(499):
                dealer.send(b"request")
            dealer.send(b"end")
            router.take_until(b"end")
    assert logged == []
