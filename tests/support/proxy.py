"""A TCP proxy that a test puts between two workers, to cut their connections and to change what passes."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from stageline.pipeline.addresses import parted

Change = Callable[[bytes], bytes]


def unchanged(passing: bytes) -> bytes:
    return passing


class Lost(Exception):
    """Raised by a change: only `passes` gets through, then the connection breaks."""

    def __init__(self, passes: bytes) -> None:
        super().__init__()
        self.passes = passes


class Proxy:
    """Listens at `endpoint` and passes everything on to `target`, both `tcp://host:port`, with its key if it has one.

    `change` is applied to what comes back from the target, `change_there` to what goes there; `connections` counts
    those that were ever made.
    """

    def __init__(self, target: str) -> None:
        address, key = parted(target)
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        self._target = host, int(port)
        self.change: Change = unchanged
        self.change_there: Change = unchanged
        self.connections = 0
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}{key and '#' + key}"
        self._start(self._accept)

    def cut(self) -> None:
        """Breaks every connection that there is now."""
        with self._lock:
            for end in self._open:
                _break(end)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _break(self._listener)
        self._listener.close()
        self.cut()
        while self._threads:
            self._threads.pop().join()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._join(client)

    def _join(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target)
        except OSError:  # nothing listens there
            client.close()
            return
        with self._lock:
            self.connections += 1
            self._open += [client, server]
        self._start(lambda: self._copy(client, server, lambda passing: self.change_there(passing)))
        self._start(lambda: self._copy(server, client, lambda passing: self.change(passing)))

    def _copy(self, source: socket.socket, sink: socket.socket, change: Change) -> None:
        with suppress(OSError):  # cut
            try:
                while passing := source.recv(2**16):
                    sink.sendall(change(passing))
            except Lost as end:
                sink.sendall(end.passes)
                _break(source)
        _break(sink)
        with self._lock:
            self._open.remove(source)
            source.close()


def _break(end: socket.socket) -> None:
    with suppress(OSError):  # it is broken already
        end.shutdown(socket.SHUT_RDWR)


class Flip:
    """Changes one bit of the byte `place` bytes from now; `fired` says whether it has passed."""

    def __init__(self, place: int, bit: int) -> None:
        self._left = place
        self._bit = bit
        self.fired = False

    def __call__(self, passing: bytes) -> bytes:
        if self.fired or self._left >= len(passing):
            self._left -= len(passing)
            return passing
        changed = bytearray(passing)
        changed[self._left] ^= 1 << self._bit
        self.fired = True
        return bytes(changed)
