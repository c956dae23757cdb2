"""Handshake of a consumer with its producer, of which the events of its socket's monitor tell when it is stuck.

not connected ─────> CONNECTED ──> HANDSHAKE_SUCCEEDED
^               v                 v
└─(maybe)── DISCONNECTED <────────┘         stuck: too long CONNECTED, or DISCONNECTED for good
"""

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from .connection_guard import open_monitor

_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Handshake:
    """Watch over the connection of `socket`, which is not connected yet. Times are monotonic, in seconds."""

    def __init__(self, context: "zmq.Context[Any]", socket: "zmq.Socket[Any]") -> None:
        """Begin to watch `socket`, a socket of `context`."""
        self._socket = socket
        self._stuck: float | None = None  # since when there has been no completed handshake
        self._events = open_monitor(context, socket, int(_EVENTS))

    def fails(self, now: float, patience: float) -> bool:
        """Return True if for `patience` seconds the connection has been without a handshake, or ended."""
        newest = None
        while self._events.poll(0):
            newest = recv_monitor_message(self._events)["event"]
        if newest is not None:
            self._stuck = None if newest == zmq.EVENT_HANDSHAKE_SUCCEEDED else now
        return self._stuck is not None and now - self._stuck >= patience

    def close(self) -> None:
        """Stop watching. Call this before the socket is closed."""
        self._socket.disable_monitor()
        self._events.close()
