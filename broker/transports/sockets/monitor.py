"""Opens the monitor of a ZeroMQ socket: a second socket, which brings the events of its connections."""

from typing import Any

import zmq


def open_monitor(context: "zmq.Context[Any]", socket: "zmq.Socket[Any]", events: int) -> "zmq.Socket[Any]":
    """The end that brings `events` (`zmq.EVENT_*`, or-ed) of `socket`, which neither connects nor listens yet.

    Call `socket.disable_monitor()` and close this end before `socket` is closed.
    """
    address = f"inproc://monitor-{id(socket)}"
    socket.monitor(address, events)
    monitor: zmq.Socket[Any] = context.socket(zmq.PAIR)
    monitor.set(zmq.LINGER, 0)
    monitor.set(zmq.RCVHWM, 0)  # with a limit, unread events would stop all sockets for good
    monitor.connect(address)
    return monitor
