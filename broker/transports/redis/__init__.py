"""A Redis or Valkey server as a transport: queues in streams, the broker's channel, the broker's store.

May import everything of broker below it. Read `queues.py` first: one stream for each queue, two threads for each
worker.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import parse_qs, urlsplit

from stageline.broker.control.channel import ClientChannel, ServerChannel
from stageline.broker.control.store import KEPT_STEPS, Store
from stageline.broker.keys.admission import ServerKeys
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.transports.base import Backend, key_expected, place_of
from stageline.pipeline.addresses import is_elsewhere, register, unclear_password

if TYPE_CHECKING:
    from stageline.broker.queues.base import WorkerQueues
    from stageline.broker.queues.ends import QueueOptions


class RedisBackend(Backend):
    """Transport over a server that all connect to: through TCP, TLS or a Unix socket."""

    schemes: ClassVar[Mapping[str, str]] = {
        "redis": "redis://127.0.0.1:6379/0",
        "rediss": "rediss://user:password@host:6379/0",
        "unix": "unix:///run/redis.sock",
    }
    has_server = is_shared = carries_control = keeps_records = True

    def fault(self, url: str) -> str | None:
        """Return why `url` is not a valid address; None if it is valid."""
        if (unclear := unclear_password(url)) is not None:
            return unclear
        parts = urlsplit(url)
        if parts.scheme == "unix":
            return None if parts.path else "the path of a socket is missing"
        if not parts.hostname:
            return "a host is missing"
        if not re.fullmatch(r"(/\d*)?", parts.path):
            return f"what follows the host, {parts.path!r}, is not the number of a database"
        return None

    def crosses(self, url: str) -> bool:
        """Return True if the server at the valid `url` may be on another machine."""
        parts = urlsplit(url)
        return parts.scheme != "unix" and is_elsewhere(parts.hostname or "")

    def lacking(self, url: str) -> tuple[str, ...]:
        """Return the protections, of "a password" and "TLS", that the server at the valid `url` is used without.

        Nothing is lacking for a Unix socket or a loopback address. A client certificate counts as a password.
        """
        parts = urlsplit(url)
        if not self.crosses(url):
            return ()
        is_encrypted = parts.scheme == "rediss"
        proofs = ("password", "ssl_certfile") if is_encrypted else ("password",)
        is_proven = bool(parts.password or any(parse_qs(parts.query).get(each) for each in proofs))
        return (*(() if is_proven else ("a password",)), *(() if is_encrypted else ("TLS",)))

    def open_queues(
        self, url: str, run: str, incarnation: int, options: "QueueOptions", *, folder: Path, since: int = 0
    ) -> "WorkerQueues":
        """Open the queue ends of one worker, as `Backend.open_queues`."""
        from .queues import RedisQueues

        return RedisQueues(run, incarnation, url, options, since=since)

    def open_client(self, url: str, pair: KeyPair | None = None, *, keeps: bool = False) -> ClientChannel:
        """Return a connection to the broker at `url`, as `Backend.open_client`.

        `keeps` makes no difference: a message to a server that is away is lost.
        """
        from .channel import RedisClientChannel

        address, key = key_expected(url, pair)
        if pair is None or key is None:
            return RedisClientChannel(address)
        from .sealed_channel import sealed_client  # its ciphers take 12 ms to load

        return sealed_client(address, pair, key)

    def open_server(self, url: str, keys: ServerKeys | None = None) -> ServerChannel:
        """Return the channel of a broker at the server, as `Backend.open_server`.

        Raises `AddressUnusable`, `EndpointTaken`, `RedisUnfit` and `RedisAway`.
        """
        from .channel import RedisServerChannel

        address = place_of(url, keys)
        if keys is None:
            return RedisServerChannel(address)
        from .sealed_channel import sealed_server

        return sealed_server(address, keys)

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
        """Return the store of `run` at the server, as `Backend.open_store`."""
        from .store import RedisStore

        return RedisStore(url, run, kept_steps, patience, waiting, secret)

    def check_server(self, url: str) -> str:
        """Return a sentence about the server at `url`, with warnings.

        Raises `RedisAway`, `RedisRefusal` or `RedisUnfit` if it cannot be reached or is not fit.
        """
        from .connection import RedisLink

        with closing(RedisLink(url)) as link:
            link.ask(b"PING")
            return "; ".join((f"{link.address} is there", *link.warnings))

    def forget(self, url: str, run: str) -> None:
        """Remove the queues of `run` from the server at `url`, as the function `forget` of `queues.py`."""
        from .queues import forget

        forget(url, run)

    def forget_by_hand(self, run: str) -> str:
        """Return the command by which a person removes the queues of `run` from the server."""
        from .entries import prefix

        return f"redis-cli --scan --pattern '{prefix(run)}*' | grep -v :store: | xargs redis-cli unlink"


register(RedisBackend())
