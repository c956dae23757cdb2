"""A bell that any thread, or a signal handler, may ring to wake the one thread that waits for queues."""

import socket
from contextlib import suppress


class Wakeup:
    """`fileno` becomes readable when somebody rings, and stays so until `silence`."""

    def __init__(self) -> None:
        self._ear, self._hand = socket.socketpair()
        self._ear.setblocking(False)
        self._hand.setblocking(False)

    def ring(self) -> None:
        """Never blocks, never fails: a bell that rings already, or is closed, is left alone."""
        with suppress(OSError):
            self._hand.send(b"!")

    def silence(self) -> None:
        with suppress(BlockingIOError):
            while self._ear.recv(4096):
                pass

    def fileno(self) -> int:
        return self._ear.fileno()

    def close(self) -> None:
        self._hand.close()
        self._ear.close()
