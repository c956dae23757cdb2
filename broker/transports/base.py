"""Backends, which open what an address names.

That is a worker's queues, a channel to or of the broker, or a store of the broker's records.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stageline.broker.control.channel import ClientChannel, ServerChannel
from stageline.broker.control.store import KEPT_STEPS, Store
from stageline.broker.errors import AddressUnusable
from stageline.pipeline.addresses import Transport, masked, transport_of

if TYPE_CHECKING:
    from stageline.broker.queues.base import WorkerQueues
    from stageline.broker.queues.ends import QueueOptions


class Backend(Transport):
    """Transport that can be opened. An instance is registered for each kind of address.

    Methods import what they need: the module of a backend is loaded to ask for facts, which must be fast.
    """

    def open_queues(
        self, url: str, run: str, incarnation: int, options: "QueueOptions", *, folder: Path, since: int = 0
    ) -> "WorkerQueues":
        """Open the queue ends of one worker.

        Args:
            url: `queues.url` of the plan.
            run: Id of the run.
            incarnation: Number of the worker, higher than those of its predecessors.
            options: Windows, limits and the run's queue key.
            folder: Folder of this worker for its sockets.
            since: What producers of this incarnation or an older one have left at a server is ignored.

        Raises:
            BrokerError: The address is taken, or the server cannot be reached or is not fit.
        """
        raise AddressUnusable(f"{masked(url)} is not an address of queues between processes")

    def open_client(self, url: str, *, keeps: bool = False) -> ClientChannel:
        """Return a connection to the broker at `url`. Raises `AddressUnusable`.

        With `keeps`, messages sent before the connection is established wait for it.
        """
        raise AddressUnusable(f"{masked(url)} is not an address of a broker")

    def open_server(self, url: str) -> ServerChannel:
        """Return the channel of a broker that listens at `url`.

        Raises:
            AddressUnusable: A broker cannot be found at such an address.
            EndpointTaken: The address cannot be bound.
            BrokerError: The address is that of a server, which cannot be reached or is not fit.
        """
        raise AddressUnusable(f"{masked(url)} is not an address of a broker")

    def open_store(
        self, url: str, run: str, patience: float, waiting: Callable[[str], None], *, kept_steps: int = KEPT_STEPS
    ) -> Store:
        """Return the store of `run`.

        Args:
            url: Address of the store.
            run: Id of the run.
            patience: Seconds that a server which is away is waited for.
            waiting: Called with the reason before each pause of that wait, of a second at most; may raise.
            kept_steps: Steps whose times are kept for each stage.
        """
        raise AddressUnusable(f"{masked(url)} is not an address of a store")

    def listens(self, url: str) -> bool:
        """Return True if a process accepts connections at `url`, or if only an answer can tell."""
        return True

    def check_server(self, url: str) -> str:
        """Return a sentence about the server at `url`. Raises `BrokerError` if it cannot be reached or is not fit."""
        raise AddressUnusable(f"{masked(url)} is not the address of a server")

    def forget(self, url: str, run: str) -> None:
        """Remove the queues of `run` from the server at `url`. Raises `BrokerError`."""

    def forget_by_hand(self, run: str) -> str:
        """Return the command by which a person removes the queues of `run` from the server; "" without a server."""
        return ""


_UNKNOWN = Backend()


def backend_of(url: str) -> Backend:
    """Return the backend for `url`; for an unknown scheme, one that opens nothing."""
    found = transport_of(url)
    return found if isinstance(found, Backend) else _UNKNOWN


def open_client(url: str, *, keeps: bool = False) -> ClientChannel:
    """Return a connection to the broker at `url`: see `Backend.open_client`."""
    return backend_of(url).open_client(url, keeps=keeps)


def open_server(url: str) -> ServerChannel:
    """Return the channel of a broker that listens at `url`: see `Backend.open_server`."""
    return backend_of(url).open_server(url)
