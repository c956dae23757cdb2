"""Whether somebody at the other end of a connection speaks ZeroMQ.

When the bytes on a connection are not its protocol, ZeroMQ gives it up for good, or takes them for those of its first
version, and says nothing of either. Only the events of its monitor tell:

    nobody there yet ──> CONNECTED ──> HANDSHAKE_SUCCEEDED
             ^               v                 v
             └─(maybe)── DISCONNECTED <────────┘         stuck: too long CONNECTED, or DISCONNECTED for good
"""

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from .socket_options import Context, Socket

_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Handshake:
    """Watches the connection of `socket`, which has not been made yet. Times are monotonic, in seconds."""

    def __init__(self, context: Context, socket: Socket) -> None:
        self._socket = socket
        self._stuck: float | None = None  # since when it was seen without a peer that has greeted
        place = f"inproc://greeting-{id(self)}"
        socket.monitor(place, int(_EVENTS))
        self._events: zmq.Socket[Any] = context.socket(zmq.PAIR)
        self._events.set(zmq.LINGER, 0)
        self._events.set(zmq.RCVHWM, 0)  # with a bound, events that nobody has read would stop all sockets for good
        self._events.connect(place)

    def fails(self, now: float, patience: float) -> bool:
        """Whether for `patience` seconds there has been a connection over which nobody greets, or the end of one."""
        newest = None
        while self._events.poll(0):
            newest = recv_monitor_message(self._events)["event"]
        if newest is not None:
            self._stuck = None if newest == zmq.EVENT_HANDSHAKE_SUCCEEDED else now
        return self._stuck is not None and now - self._stuck >= patience

    def close(self) -> None:
        """Before the socket is closed."""
        self._socket.disable_monitor()
        self._events.close()
