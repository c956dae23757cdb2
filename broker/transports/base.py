"""Backends, which open what an address names.

That is a worker's queues, a channel to or of the broker, or a store of the broker's records.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stageline.broker.control.channel import ClientChannel, ServerChannel
from stageline.broker.control.store import KEPT_STEPS, Store
from stageline.broker.errors import AddressUnusable, BadKey
from stageline.broker.keys.admission import ServerKeys
from stageline.broker.keys.join_line import split_key
from stageline.broker.keys.pairs import KeyPair, PublicKey
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
            options: Windows, limits and secrets.
            folder: Folder of this worker for its sockets.
            since: What producers of this incarnation or an older one have left at a server is ignored.

        Raises:
            BrokerError: The address is taken, or the server cannot be reached or is not fit.
        """
        raise AddressUnusable(f"{masked(url)} is not an address of queues between processes")

    def open_client(self, url: str, pair: KeyPair | None = None, *, keeps: bool = False) -> ClientChannel:
        """Return a connection to the broker at `url`.

        Args:
            url: Address; a keyed one for a broker with keys.
            pair: Pair by which the broker knows this process; None for an address without a key.
            keeps: If True, messages sent before the connection is established wait for it.

        Raises:
            AddressUnusable: A broker cannot be found at such an address, or the key in it is no key, or goes without a
                pair, or the pair without a key.
        """
        raise AddressUnusable(f"{masked(url)} is not an address of a broker")

    def open_server(self, url: str, keys: ServerKeys | None = None) -> ServerChannel:
        """Return the channel of a broker that listens at `url`.

        Args:
            url: Address. A key in it is the broker's own.
            keys: Keys of the broker, whose channel has a keyed address as its `endpoint` then; None: it has none.

        Raises:
            AddressUnusable: A broker cannot be found at such an address, or one with another key.
            EndpointTaken: The address cannot be bound.
            BrokerError: The address is that of a server, which cannot be reached or is not fit.
        """
        raise AddressUnusable(f"{masked(url)} is not an address of a broker")

    def open_store(
        self,
        url: str,
        run: str,
        patience: float,
        waiting: Callable[[str], None],
        *,
        kept_steps: int = KEPT_STEPS,
        secret: bytes = b"",
    ) -> Store:
        """Return the store of `run`.

        Args:
            url: Address of the store.
            run: Id of the run.
            patience: Seconds that a server which is away is waited for.
            waiting: Called with the reason before each pause of that wait, of a second at most; may raise.
            kept_steps: Steps whose times are kept for each stage.
            secret: Secret of the broker, that seals what the server keeps; b"" leaves it in clear.
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


def open_client(url: str, pair: KeyPair | None = None, *, keeps: bool = False) -> ClientChannel:
    """Return a connection to the broker at `url`: see `Backend.open_client`."""
    return backend_of(url).open_client(url, pair, keeps=keeps)


def open_server(url: str, keys: ServerKeys | None = None) -> ServerChannel:
    """Return the channel of a broker that listens at `url`: see `Backend.open_server`."""
    return backend_of(url).open_server(url, keys)


def key_expected(url: str, pair: KeyPair | None) -> tuple[str, PublicKey | None]:
    """Return an address without its key, and the key, for a process that has `pair` and dials it.

    Raises `AddressUnusable` for a key that is none, and for one of key and pair without the other: nothing is said in
    clear that is meant to be sealed.
    """
    address, key = _split(url)
    if key is not None and pair is None:
        raise AddressUnusable(f"cannot use {masked(url)}: what listens there has a key, and this process has none")
    if key is None and pair is not None:
        raise AddressUnusable(
            f"cannot use {masked(url)}: it does not end with the key of what listens there, as in tcp://desk:7000#k1.<key>"
        )
    return address, key


def place_of(url: str, keys: ServerKeys | None) -> str:
    """Return the address at which a broker with `keys` listens, which is `url` without its key.

    Raises `AddressUnusable` if that is not the broker's key.
    """
    address, key = _split(url)
    own = None if keys is None else keys.pair.public
    if key not in (None, own):
        named = "this one has none" if own is None else f"this one's key is {own.text}"
        raise AddressUnusable(f"cannot listen at {masked(url)}: it ends with the key of another broker; {named}")
    return address


def _split(url: str) -> tuple[str, PublicKey | None]:
    try:
        return split_key(url)
    except BadKey as error:
        raise AddressUnusable(f"cannot use {masked(url)}: {error}") from error
