"""A proxy between workers that hands everything on after a time, in both directions, and loses nothing."""

import socket
import threading
from contextlib import suppress
from queue import SimpleQueue
from time import monotonic, sleep

from stageline.workers.process import worker


class DelayedLink:
    """Listens at `endpoint`, and passes all on to `target` and back, each `seconds` after it came."""

    def __init__(self, target: str, seconds: float) -> None:
        host, port = target.removeprefix("tcp://").rsplit(":", 1)
        self._target, self._seconds = (host, int(port)), seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._target)
            for source, sink in ((client, server), (server, client)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                due: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
                threading.Thread(target=self._read, args=(source, due), daemon=True).start()
                threading.Thread(target=_write, args=(due, sink), daemon=True).start()

    def _read(self, source: socket.socket, due: "SimpleQueue[tuple[float, bytes]]") -> None:
        with suppress(OSError):
            while passing := source.recv(2**18):
                due.put((monotonic() + self._seconds, passing))
        due.put((monotonic() + self._seconds, b""))


def _write(due: "SimpleQueue[tuple[float, bytes]]", sink: socket.socket) -> None:
    with suppress(OSError):
        while True:
            at, passing = due.get()
            if (left := at - monotonic()) > 0:
                sleep(left)
            if not passing:
                sink.shutdown(socket.SHUT_RDWR)
                return
            sink.sendall(passing)


def delay_links(seconds: float) -> None:
    """From now on, the queues of a worker in this process are reached through such a proxy."""
    plain = worker.reachable

    def delayed(endpoint: str, broker: str) -> str:
        here = plain(endpoint, broker)
        return DelayedLink(here, seconds).endpoint if here.startswith("tcp://") else here

    worker.reachable = delayed
