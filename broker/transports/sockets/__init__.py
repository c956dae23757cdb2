"""Transports without a server: shared memory on one machine, ZeroMQ across machines, also through a relay.

May import everything of broker below it. Read `shm_queues.py` first, then `shm_producer.py`, `shm_memory.py`.
"""

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from stageline.broker.control.channel import ClientChannel, ServerChannel
from stageline.broker.errors import BadKey
from stageline.broker.keys.admission import ServerKeys
from stageline.broker.keys.join_line import split_key
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.transports.base import Backend, key_expected, place_of
from stageline.pipeline.addresses import EVERY_INTERFACE, Reach, parted, register

from .relay import RelayBackend

if TYPE_CHECKING:
    from stageline.broker.queues.base import WorkerQueues
    from stageline.broker.queues.ends import QueueOptions

_TCP = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+]|[^\s:/\[\]]+):(?P<port>[0-9]+|\*)(?:-(?P<last>[0-9]+))?")
_CONNECTING = 1.0  # seconds to wait until something accepts a connection


class ShmBackend(Backend):
    """Transport over Unix sockets and shared memory between processes of one machine. Needs Linux."""

    schemes: ClassVar[Mapping[str, str]] = {"shm": "shm://"}
    reach = Reach.MACHINE
    in_folder = True

    def hides(self, url: str) -> bool:
        """Return False: such an address has no password."""
        return False

    def open_queues(
        self, url: str, run: str, incarnation: int, options: "QueueOptions", *, folder: Path, since: int = 0
    ) -> "WorkerQueues":
        """Open the queue ends of one worker at a socket in `folder`, as `Backend.open_queues`."""
        from .shm_queues import ShmQueues

        return ShmQueues(run, incarnation, f"shm://{folder}/queues", options)


class _ZeroMQBackend(Backend):
    carries_control = True

    def open_queues(
        self, url: str, run: str, incarnation: int, options: "QueueOptions", *, folder: Path, since: int = 0
    ) -> "WorkerQueues":
        """Open the queue ends of one worker, as `Backend.open_queues`."""
        from .zeromq_queues import ZeroMQQueues

        return ZeroMQQueues(run, incarnation, self._bound(url, folder), options)

    def open_client(self, url: str, pair: KeyPair | None = None, *, keeps: bool = False) -> ClientChannel:
        """Return a connection to the broker at `url`, as `Backend.open_client`."""
        from .curve import client_of
        from .zeromq_channel import ZeroMQClientChannel

        address, key = key_expected(url, pair)
        return ZeroMQClientChannel(address, client_of(pair, key), keeps=keeps)

    def open_server(self, url: str, keys: ServerKeys | None = None) -> ServerChannel:
        """Return the channel of a broker that listens at `url`, as `Backend.open_server`."""
        from .curve import server_of
        from .zeromq_channel import ZeroMQServerChannel

        return ZeroMQServerChannel(place_of(url, keys), server_of(keys))

    def listens(self, url: str) -> bool:
        """Return False if no process listens at `url`; True if one does, or only an answer can tell."""
        try:
            self._probe(url)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except (OSError, ValueError):
            return True
        return True

    def _bound(self, url: str, folder: Path) -> str:
        """Return the address at which a worker's queues listen."""
        return url

    def _probe(self, url: str) -> None:
        """Connect to `url` for a moment."""


class IpcBackend(_ZeroMQBackend):
    """ZeroMQ over Unix sockets, between processes of one machine."""

    schemes: ClassVar[Mapping[str, str]] = {"ipc": "ipc:///tmp/stageline"}
    reach = Reach.MACHINE
    in_folder = True

    def hides(self, url: str) -> bool:
        """Return False: such an address has no password."""
        return False

    def _bound(self, url: str, folder: Path) -> str:
        return f"ipc://{folder}/queues"

    def _probe(self, url: str) -> None:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(re.sub("^@", "\0", url.removeprefix("ipc://")))  # Linux's abstract names


class TcpBackend(_ZeroMQBackend):
    """ZeroMQ over TCP, across machines."""

    schemes: ClassVar[Mapping[str, str]] = {"tcp": "tcp://127.0.0.1:5600"}

    def fault(self, url: str) -> str | None:
        """Return why `url` is not a valid address, of a host and a port or ports from-to; None if it is valid."""
        try:
            address, _ = split_key(url)
        except BadKey as error:
            return str(error)
        found = _TCP.fullmatch(address.removeprefix("tcp://"))
        if found is None:
            return "tcp:// goes with a host and a port"
        first, last = found["port"], found["last"]
        if any(port and port != "*" and int(port) > 65535 for port in (first, last)):
            return "a port is at most 65535"
        if last and not (first.isdigit() and 0 < int(first) < int(last)):
            return "a range of ports ascends from 1 on, such as 5600-5609"
        return None

    def host(self, url: str) -> str:
        """Return the part of `url` between scheme and port, an IPv6 address in its brackets."""
        return parted(url)[0].removeprefix("tcp://").rpartition(":")[0]

    def has_free_port(self, url: str) -> bool:
        """Return True if the port of `url` is 0, *, one of a range, or missing."""
        port = _port(url)
        return port.strip("0") in ("", "*") or "-" in port

    def hides(self, url: str) -> bool:
        """Return True if `url` has an @, which a user and a password may stand before."""
        return "@" in url

    def _probe(self, url: str) -> None:
        host = self.host(url)
        host = "127.0.0.1" if host in EVERY_INTERFACE else host.strip("[]")
        socket.create_connection((host, int(_port(url))), timeout=_CONNECTING).close()


def _port(url: str) -> str:
    return parted(url)[0].rpartition(":")[2]


for _each in (ShmBackend(), IpcBackend(), TcpBackend(), RelayBackend()):
    register(_each)
