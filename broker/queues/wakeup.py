"""Alarm of a thread that waits for queues."""

import socket
from contextlib import suppress


class Wakeup:
    """Alarm of the one thread that waits for queues: the descriptor `fd` is readable from `ring` until `silence`."""

    def __init__(self) -> None:
        """Open a pair of sockets, which `close` closes."""
        self._receiving, self._sending = socket.socketpair()
        self._receiving.setblocking(False)
        self._sending.setblocking(False)
        self.fd = self._receiving.fileno()

    def ring(self) -> None:
        """Wake the waiting thread. Never blocks or fails, in any thread or signal handler, even after `close`."""
        with suppress(OSError):
            self._sending.send(b"!")

    def silence(self) -> None:
        """Make `fd` unreadable until the next `ring`."""
        with suppress(BlockingIOError):
            while self._receiving.recv(4096):
                pass

    def close(self) -> None:
        """Close the sockets; a later `ring` does nothing."""
        self._sending.close()
        self._receiving.close()
