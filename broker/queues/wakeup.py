"""Wakes the one thread that waits for queues, from any thread or signal handler."""

import socket
from contextlib import suppress


class Wakeup:
    """`fileno` becomes readable by `ring`, and stays so until `silence`."""

    def __init__(self) -> None:
        self._receiving, self._sending = socket.socketpair()
        self._receiving.setblocking(False)
        self._sending.setblocking(False)

    def ring(self) -> None:
        """Never blocks, never fails: to ring again, or after `close`, does nothing."""
        with suppress(OSError):
            self._sending.send(b"!")

    def silence(self) -> None:
        with suppress(BlockingIOError):
            while self._receiving.recv(4096):
                pass

    def fileno(self) -> int:
        return self._receiving.fileno()

    def close(self) -> None:
        self._sending.close()
        self._receiving.close()
