"""Whether the other end of a connection has completed ZeroMQ's handshake.

When the bytes on a connection are not its protocol, ZeroMQ gives it up for good, or takes them for those of its first
version, and reports neither. Only the events of its monitor show it:

    not connected ─────> CONNECTED ──> HANDSHAKE_SUCCEEDED
             ^               v                 v
             └─(maybe)── DISCONNECTED <────────┘         stuck: too long CONNECTED, or DISCONNECTED for good
"""

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from .socket_options import Context, Socket

_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Handshake:
    """Watches the connection of `socket`, which is not connected yet. Times are monotonic, in seconds."""

    def __init__(self, context: Context, socket: Socket) -> None:
        self._socket = socket
        self._stuck: float | None = None  # since when there has been no completed handshake
        address = f"inproc://handshake-{id(self)}"
        socket.monitor(address, int(_EVENTS))
        self._events: zmq.Socket[Any] = context.socket(zmq.PAIR)
        self._events.set(zmq.LINGER, 0)
        self._events.set(zmq.RCVHWM, 0)  # with a limit, unread events would stop all sockets for good
        self._events.connect(address)

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
