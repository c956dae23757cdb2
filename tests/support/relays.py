"""A relay in a thread of the test, which can be killed and started again at its port, and keys of its users."""

import asyncio
import socket
import threading
from functools import cache

from stageline.broker.keys.pairs import KeyPair
from stageline.broker.transports.sockets.relay_address import RelayAddress
from stageline.broker.transports.sockets.relay_handshake import (
    ANSWER_BYTES,
    NOTE_BYTES,
    DiallersHandshake,
    NoteCode,
    RelayRequest,
    RelaySession,
    admission_secret,
)
from stageline.broker.transports.sockets.relay_server import Relay
from support.control_channels import PATIENCE

RELAY = KeyPair.of_secret(bytes(31) + bytes([9]))
ADMISSION = admission_secret(RELAY, 0)


class RunningRelay:
    """A relay at 127.0.0.1, from the constructor until `close`."""

    def __init__(self, port: int = 0, *, pair: KeyPair = RELAY) -> None:
        self.relay = Relay("127.0.0.1", port, pair, ADMISSION)
        self.port = self.relay.port
        self.address = RelayAddress("127.0.0.1", self.port, pair.public, secret=ADMISSION)
        self.url = self.address.url
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self.relay.serve())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Breaks all its connections, as the end of its process does."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join()

    def restarted(self) -> "RunningRelay":
        self.close()
        return RunningRelay(self.port)

    def _run(self) -> None:
        self._loop.run_until_complete(asyncio.gather(self._serving, return_exceptions=True))
        self._loop.close()


@cache
def shared_relay() -> RunningRelay:
    """One for all tests of this process that leave it as it is."""
    return RunningRelay()


def asked(relay: RunningRelay, pair: KeyPair, request: RelayRequest) -> tuple[socket.socket, RelaySession]:
    """A connection to the relay over which `pair` has asked for something, and its session."""
    connection = socket.create_connection(("127.0.0.1", relay.port), timeout=PATIENCE)
    asking = DiallersHandshake(relay.address, pair)
    connection.sendall(asking.hello)
    sealed, session = asking.request(read(connection, ANSWER_BYTES), request)
    connection.sendall(sealed)
    return connection, session


def told(connection: socket.socket, session: RelaySession) -> tuple[NoteCode, bytes]:
    """The next note that is no ping."""
    while (note := session.open(read(connection, NOTE_BYTES)))[0] is NoteCode.PING:
        connection.sendall(session.seal(NoteCode.PONG))
    return note


def read(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        assert more, f"the connection has ended after {len(found)} of {count} bytes"
        found += more
    return found
