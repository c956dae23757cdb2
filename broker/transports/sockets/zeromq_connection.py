"""A connection of the queues' sockets: their options, with the reason for each, and whether its handshake completed.

When the bytes on a connection are not its protocol, ZeroMQ gives it up for good, or takes them for those of its first
version, and reports neither. Only the events of its monitor show it:

    not connected ─────> CONNECTED ──> HANDSHAKE_SUCCEEDED
             ^               v                 v
             └─(maybe)── DISCONNECTED <────────┘         stuck: too long CONNECTED, or DISCONNECTED for good
"""

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from stageline.broker.codec.message import LIMITS

from .connection_guard import open_monitor

Socket = zmq.Socket[Any]
Context = zmq.Context[Socket]

REQUEST_BYTES = 2**12  # the most that a request may have
SOLE_WAIT = 20  # ms that a worker without unsent messages waits at one socket before it polls all of them

COMMON_OPTIONS: dict[int, int] = {
    zmq.HANDSHAKE_IVL: 5000,  # ms after which a connection without ZeroMQ's handshake is dropped
    # A dead host is noticed by TCP, not by ZeroMQ's heartbeats: those time out while one long message is on its way.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,  # seconds
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 4,
    zmq.TCP_MAXRT: 30_000,  # ms that sent bytes may stay unconfirmed
}
OPTIONS: dict[int, dict[int, int]] = {
    # The producing side: bound, with many connections, sending to one of them at a time.
    zmq.ROUTER: {
        zmq.ROUTER_MANDATORY: 1,  # a connection that is gone or full is an error, not a silent loss
        zmq.MAXMSGSIZE: REQUEST_BYTES,
        zmq.LINGER: 1000,  # ms; the last messages of a run may still be on their way out
    },
    # The consuming side: connected to one producing worker.
    zmq.DEALER: {
        zmq.IMMEDIATE: 1,  # without a connection a request is not queued, so that it is sent up to date
        zmq.MAXMSGSIZE: LIMITS.message_bytes,  # per frame
        zmq.LINGER: 0,  # a request is of no use after this end is gone
        zmq.RCVTIMEO: SOLE_WAIT,
        zmq.RECONNECT_IVL: 20,  # ms
        zmq.RECONNECT_IVL_MAX: 1000,
    },
}

_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def open_socket(context: Context, kind: int, hwm: int) -> Socket:
    """A ROUTER or a DEALER with its options. Credit keeps `hwm` messages or fewer under way; the socket's own limit
    holds should that fail."""
    socket = context.socket(kind)
    try:
        for option, value in {**COMMON_OPTIONS, **OPTIONS[kind], zmq.SNDHWM: hwm, zmq.RCVHWM: hwm}.items():
            socket.set(option, value)
    except BaseException:
        socket.close()
        raise
    return socket


class Handshake:
    """Watches the connection of `socket`, which is not connected yet. Times are monotonic, in seconds."""

    def __init__(self, context: Context, socket: Socket) -> None:
        self._socket = socket
        self._stuck: float | None = None  # since when there has been no completed handshake
        self._events = open_monitor(context, socket, int(_EVENTS))

    def fails(self, now: float, patience: float) -> bool:
        """Whether for `patience` seconds the connection has been without a handshake, or ended."""
        newest = None
        while self._events.poll(0):
            newest = recv_monitor_message(self._events)["event"]
        if newest is not None:
            self._stuck = None if newest == zmq.EVENT_HANDSHAKE_SUCCEEDED else now
        return self._stuck is not None and now - self._stuck >= patience

    def close(self) -> None:
        """Call before the socket is closed."""
        self._socket.disable_monitor()
        self._events.close()
