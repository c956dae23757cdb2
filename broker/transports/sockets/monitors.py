"""Monitors of ZeroMQ's sockets: what happens to their connections, as events.

`zmq.utils.monitor` decodes events too, and imports asyncio, for which a command that only asks would wait.
"""

import struct
from itertools import count
from typing import Any

import zmq

_EVENT = struct.Struct("=Hi")  # the event, and its value: a descriptor, or the status of a handshake
_numbers = count()  # of monitors in this process


def open_monitor(context: "zmq.Context[Any]", socket: "zmq.Socket[Any]", events: int) -> "zmq.Socket[Any]":
    """Return the socket that brings `events` of `socket`, which neither connects nor listens yet.

    Call `socket.disable_monitor()` and close the returned socket before `socket` is closed.

    Args:
        context: Context of `socket`.
        socket: Socket to watch.
        events: `zmq.EVENT_*`, or-ed.
    """
    address = f"inproc://monitor-{next(_numbers)}"  # not by id(socket): a closed one's address is freed later
    socket.monitor(address, events)
    monitor: zmq.Socket[Any] = context.socket(zmq.PAIR)
    monitor.set(zmq.LINGER, 0)
    monitor.set(zmq.RCVHWM, 0)  # with a limit, unread events would stop all sockets for good
    monitor.connect(address)
    return monitor


def received_event(monitor: "zmq.Socket[Any]") -> tuple[int, int]:
    """Return the next event that `monitor` brings, one of `zmq.EVENT_*`, and its value."""
    event, value = _EVENT.unpack(monitor.recv_multipart()[0])
    return event, value
