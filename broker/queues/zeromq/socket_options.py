"""The options of the queues' sockets, and the reason for each."""

from typing import Any

import zmq

Socket = zmq.Socket[Any]
Context = zmq.Context[Socket]

REQUEST_BYTES = 2**12  # the most that a request may have
HANDSHAKE_TIMEOUT = 5000  # ms after which a connection without ZeroMQ's handshake is dropped
SOLE_WAIT = 20  # ms that a worker without unsent messages waits at one socket before it polls all of them


def for_router(socket: Socket, hwm: int) -> None:
    """The producing side: bound, with many connections, sending to one of them at a time."""
    _for_all(socket, hwm)
    socket.set(zmq.ROUTER_MANDATORY, 1)  # a connection that is gone or full is an error, not a silent loss
    socket.set(zmq.MAXMSGSIZE, REQUEST_BYTES)
    socket.set(zmq.LINGER, 1000)  # ms; the last messages of a run may still be on their way out


def for_dealer(socket: Socket, hwm: int, message_bytes: int) -> None:
    """The consuming side: connected to one producing worker."""
    _for_all(socket, hwm)
    socket.set(zmq.IMMEDIATE, 1)  # without a connection a request is not queued, so that it is sent up to date
    socket.set(zmq.MAXMSGSIZE, message_bytes)  # per frame
    socket.set(zmq.LINGER, 0)  # a request is of no use after this end is gone
    socket.set(zmq.RCVTIMEO, SOLE_WAIT)
    socket.set(zmq.RECONNECT_IVL, 20)
    socket.set(zmq.RECONNECT_IVL_MAX, 1000)


def _for_all(socket: Socket, hwm: int) -> None:
    socket.set(zmq.SNDHWM, hwm)  # messages; credit keeps as few under way, this holds should it fail
    socket.set(zmq.RCVHWM, hwm)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT)
    # A dead host is noticed by TCP, not by ZeroMQ's heartbeats: those time out while one long message is on its way.
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 10)  # seconds
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 4)
    socket.set(zmq.TCP_MAXRT, 30_000)  # ms that sent bytes may stay unconfirmed
