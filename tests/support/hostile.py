"""Clients that mean harm: they speak as much of ZeroMQ's protocol as their attack needs, over plain sockets."""

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic

MORE, LONG, COMMAND = 1, 2, 4  # flags of a ZMTP 3 frame
GREETING = b"\xff" + 7 * b"\0" + b"\x01\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + 31 * b"\0"
PATIENCE = 20.0  # seconds in which a peer that must be refused is


def frame(body: bytes, flags: int = 0) -> bytes:
    """The bytes of a frame on the wire."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return head_of_frame(len(body), flags) + body


def head_of_frame(size: int, flags: int = 0) -> bytes:
    return bytes([flags | LONG]) + struct.pack(">Q", size)


def ready(identity: bytes = b"") -> bytes:
    """The command that ends a DEALER's handshake."""
    kind, name = b"\x0bSocket-Type", b"\x08Identity"
    body = b"\x05READY" + kind + struct.pack(">I", 6) + b"DEALER" + name + struct.pack(">I", len(identity)) + identity
    return frame(body, COMMAND)


READY = ready()


class HostileClient:
    """A connection to `endpoint`, `tcp://host:port`; `shaken`: with its handshake, of which `handshake` is the end."""

    def __init__(self, endpoint: str, *, shaken: bool = True, handshake: bytes = READY) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE)
        if shaken:
            self.socket.sendall(GREETING)
            self._read(64)
            self.socket.sendall(handshake)
            flags, size = self._read(2)
            assert flags == COMMAND
            self._read(size)

    def send(self, data: bytes) -> bool:
        """False once the other end has closed the connection."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def flood(self, data: bytes, most: int = 2**34) -> int:
        """Sends `data` again and again until the connection is closed, or `most` bytes were sent; how many were."""
        sent = 0
        while sent < most and self.send(data):
            sent += len(data)
        return sent

    def wait_until_closed(self) -> float:
        """Reads what comes until the other end closes; the seconds that it took. Raises `TimeoutError`."""
        since = monotonic()
        with suppress(ConnectionError):
            while self.socket.recv(2**16):
                pass
        return monotonic() - since

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> "HostileClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            if not (some := self.socket.recv(count - len(found))):
                raise ConnectionResetError("the other end closed the connection in the handshake")
            found += some
        return found


def endless_multipart(endpoint: str, most: int = 2**34) -> int:
    """Frames of 4 KB of one message that never ends; how many bytes were sent until the connection was closed."""
    with HostileClient(endpoint) as client:
        return client.flood(64 * frame(4096 * b"x", MORE), most)


def idle_connections(endpoint: str, count: int, stack: ExitStack) -> list[socket.socket]:
    """So many connections that say nothing; fewer if they are refused."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    made = []
    for _ in range(count):
        with suppress(OSError):
            made.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE)))
    return made


def memory(pid: int, field: str = "VmRSS") -> int:
    """Bytes of a process's memory; `VmHWM` for the most that it ever had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


@contextmanager
def peak_memory(pids: Sequence[int]) -> Iterator[dict[int, int]]:
    """The most memory that each of the processes has had within, looked at a hundred times a second."""
    peaks = {pid: memory(pid) for pid in pids}
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            for pid in pids:
                with suppress(OSError):
                    peaks[pid] = max(peaks[pid], memory(pid))

    looker = threading.Thread(target=look)
    looker.start()
    try:
        yield peaks
    finally:
        done.set()
        looker.join()


def frames_in(stream: bytes) -> list[bytes]:
    """The bodies of the messages, each of one frame, that were sent over a connection."""
    return _parsed(stream)[0]


def is_between_frames(stream: bytes) -> bool:
    """True if what was sent over a connection so far ends with a frame."""
    return _parsed(stream)[1] == len(stream)


def _parsed(stream: bytes) -> tuple[list[bytes], int]:
    """The bodies of the whole messages, and where the first begins that is not whole."""
    found, at = [], 64  # after the greeting
    while at + 2 <= len(stream):
        flags, long = stream[at], stream[at] & LONG
        size = int.from_bytes(stream[at + 1 : at + (9 if long else 2)], "big")
        begin = at + (9 if long else 2)
        if begin + size > len(stream):
            break
        at = begin + size
        if not flags & COMMAND:
            found.append(stream[begin:at])
    return found, at
