"""A server that speaks as much of Redis' protocol as a worker needs to be let in, and then answers as a test says."""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

import hiredis

_FACTS = b"redis_version:7.2.0\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n"
_INQUIRED = b"*3\r\n" + 3 * (b"$%d\r\n%b\r\n" % (len(_FACTS), _FACTS))
_FIT = {b"MULTI": b"+OK\r\n", b"INFO": b"+QUEUED\r\n", b"SELECT": b"+OK\r\n", b"AUTH": b"+OK\r\n"}


class FalseRedis:
    """Listens at `port`. To each command comes what `answers` has for its name, else for b"", bytes as they are."""

    def __init__(self, answers: Mapping[bytes, bytes]) -> None:
        self.answers = dict(answers)
        self.connections = 0
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> "FalseRedis":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for end in (self._listener, *self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        while self._threads:
            self._threads.pop().join()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                self._open.append(client)
                thread = threading.Thread(target=self._serve, args=(client,))
                thread.start()
                self._threads.append(thread)

    def _serve(self, client: socket.socket) -> None:
        commands, before = hiredis.Reader(), b""
        with client, suppress(OSError):
            while received := client.recv(2**16):
                commands.feed(received)
                while command := commands.gets():
                    client.sendall(self._answer(command[0], before))
                    before = command[0]

    def _answer(self, name: bytes, before: bytes) -> bytes:
        if (before, name) == (b"INFO", b"EXEC"):
            return _INQUIRED
        return self.answers.get(name) or _FIT.get(name) or self.answers[b""]
