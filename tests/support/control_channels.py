"""A broker's control channel in another process, and what both ends receive."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from stageline.broker.control.channel import ClientChannel, ServerChannel
from stageline.broker.keys.admission import ServerKeys
from stageline.broker.transports.base import open_client, open_server
from stageline.pipeline.addresses import needs_keys, parted
from support.keyed import BROKER, WORKER, Admitted

PATIENCE = 10.0  # seconds in which what a test waits for arrives


def serve(url: str) -> ServerChannel:
    """A broker's channel, with keys where there are none without."""
    return open_server(url, ServerKeys(BROKER, Admitted()) if needs_keys(url) else None)


def dial(endpoint: str) -> ClientChannel:
    """A channel to the broker at `endpoint`, which has a key at its end if it goes with keys."""
    return open_client(endpoint, WORKER if parted(endpoint)[1] else None, keeps=True)


def received(server: ServerChannel, count: int = 1, patience: float = PATIENCE) -> list[tuple[bytes, bytes | None]]:
    """The messages that arrive until there are `count`, or `patience` seconds are over."""
    found: list[tuple[bytes, bytes | None]] = []
    until = monotonic() + patience
    while len(found) < count and monotonic() < until:
        found += server.receive(0.1) or []
    return found


def send(client: ClientChannel, message: bytes) -> None:
    until = monotonic() + PATIENCE
    while not client.send(message):
        assert monotonic() < until, "there is no broker"


def said(server: ServerChannel, client: ClientChannel, *messages: bytes) -> list[tuple[bytes, bytes | None]]:
    """Messages that arrive once the client has sent `messages`, both at work."""
    for message in messages:
        send(client, message)
    found: list[tuple[bytes, bytes | None]] = []
    until = monotonic() + PATIENCE
    while len(found) < len(messages) and monotonic() < until:
        found += server.receive(0.05) or []
        assert client.receive(0) is None
    return found


@contextmanager
def at_work(server: ServerChannel) -> Iterator[None]:
    """A broker that takes its messages in the background."""
    done = threading.Event()

    def listen() -> None:
        while not done.is_set():
            server.receive(0.05)

    listener = threading.Thread(target=listen)
    listener.start()
    yield
    done.set()
    listener.join()
