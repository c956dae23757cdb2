"""Connections that carry something else than ZeroMQ are replaced."""

import socket
from contextlib import ExitStack

import pytest
import zmq

from stageline.broker.transports.sockets import zeromq_queues as connection
from stageline.broker.transports.sockets import zeromq_queues as dealer
from stageline.broker.transports.sockets.handshakes import Handshake
from support.proxy import Proxy
from support.zeromq_queues import proxied

GREETING = b"\xff" + 7 * b"\0" + b"\x01\x7f" + b"\x03\x00"  # ZeroMQ's, up to the name of a mechanism
GARBAGE = {
    "text, taken for ZeroMQ's first version": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" + 300 * b"z",
    "a mechanism that there is not": GREETING + b"GARBAGE".ljust(20, b"\0") + 32 * b"\0",
    "zeros": 100 * b"\0",
}


@pytest.fixture
def only_the_handshake_ends_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `Handshake` can end a connection without a handshake, and soon."""
    monkeypatch.setitem(connection.COMMON_OPTIONS, zmq.HANDSHAKE_IVL, 600_000)
    monkeypatch.setattr(dealer, "UNANSWERED", 600.0)
    monkeypatch.setattr(dealer, "NO_HANDSHAKE", 0.2)


def once(proxy: Proxy, garbage: bytes) -> None:
    """The first connection brings `garbage`."""
    proxy.change = lambda passing: garbage if proxy.connections == 1 else passing


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_a_connection_to_something_that_is_not_zeromq_is_replaced(
    stack: ExitStack, only_the_handshake_ends_connections: None, garbage: bytes
) -> None:
    """ZeroMQ gives such a connection up and reports nothing: half a minute went by until it was replaced."""
    line, proxy, connect = proxied(stack)
    line.put(0, 1)
    once(proxy, garbage)
    connect()
    assert line.take_numbers(2) == [0, 1]


def test_a_connection_on_which_garbage_arrives_is_replaced(
    stack: ExitStack, only_the_handshake_ends_connections: None, hasty: None
) -> None:
    line, proxy, connect = proxied(stack)
    connect()
    line.put(0)
    line.take()
    once(proxy, 40 * b"\xff")
    line.put(*range(1, 5))
    assert line.take_numbers(4) == [1, 2, 3, 4]
    assert proxy.connections == 2


def test_unread_events_of_a_connection_stop_no_socket(stack: ExitStack) -> None:
    """Two thousand of them, unread while a worker computed, would have filled a queue in which ZeroMQ waits for room:
    none of its sockets moved any more."""
    context = stack.enter_context(zmq.Context())
    router, friend, shown_out = (stack.enter_context(context.socket(k)) for k in (zmq.ROUTER, zmq.DEALER, zmq.DEALER))
    shown_out.set(zmq.RECONNECT_IVL, 1)
    stack.callback(Handshake(context, shown_out).close)
    door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    shown_out.connect(f"tcp://127.0.0.1:{door.getsockname()[1]}")
    friend.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    for _ in range(1500):
        door.accept()[0].close()
    friend.send(b"still here")
    assert router.poll(10_000)
