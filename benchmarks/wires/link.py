"""A slow link: a TCP proxy in front of a worker, with a bandwidth and a delay in each direction of every connection.

worker 1 ── reads ──> [ waits for its turn on the link, then for the delay ] ── writes ──> worker 0
"""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from queue import Queue

CHUNK = 16 * 1024  # bytes that are passed on at once
BUFFERED = 32  # chunks that wait for their turn; then the sender does


@dataclass(frozen=True, slots=True)
class SlowLink:
    """`rate` in bytes per second, `delay` one way in seconds."""

    rate: float
    delay: float

    def before(self, target: str) -> str:
        """The endpoint of a proxy in this process that passes everything on to `target`, both `tcp://host:port`."""
        host, port = target.removeprefix("tcp://").rsplit(":", 1)
        listener = socket.create_server(("127.0.0.1", 0))
        _start(self._accept, listener, (host, int(port)))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    def _accept(self, listener: socket.socket, target: tuple[str, int]) -> None:
        while True:
            client, _ = listener.accept()
            try:
                server = socket.create_connection(target)
            except OSError:  # it is not there yet, or gone
                client.close()
                continue
            for one, other in ((client, server), (server, client)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                on_its_way: Queue[tuple[float, bytes]] = Queue(BUFFERED + int(self.rate * self.delay / CHUNK))
                _start(self._read, one, on_its_way)
                _start(_write, on_its_way, other)

    def _read(self, source: socket.socket, on_its_way: "Queue[tuple[float, bytes]]") -> None:
        free = 0.0  # when the link has sent what came before
        passing = b"-"
        while passing:
            try:
                passing = source.recv(CHUNK)
            except OSError:
                passing = b""
            free = max(free, time.monotonic()) + len(passing) / self.rate
            time.sleep(max(0.0, free - time.monotonic()))
            on_its_way.put((free + self.delay, passing))


def _write(on_its_way: "Queue[tuple[float, bytes]]", sink: socket.socket) -> None:
    passing = b"-"
    while passing:
        due, passing = on_its_way.get()
        time.sleep(max(0.0, due - time.monotonic()))
        with suppress(OSError):  # closed at the other side
            sink.sendall(passing) if passing else sink.shutdown(socket.SHUT_WR)


def _start(work: object, *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()  # type: ignore[arg-type]
