"""The registered transports, and an address of each that a test may use: rows for the tests of what all promise."""

import re
import secrets
from collections.abc import Callable, Mapping

from stageline.broker.transports.base import Backend, backend_of
from stageline.pipeline.addresses import transports
from support.redis_server import shared_server
from support.relays import shared_relay

# A fresh place at a server for each transport that has one, by its first scheme.
SERVERS: Mapping[str, Callable[[], str]] = {
    "redis": lambda: shared_server().own_database(),
    "relay": lambda: f"{shared_relay().url}/{secrets.token_hex(6)}",
}


def registered() -> dict[str, Backend]:
    """Every backend once, by the first of its schemes."""
    return {next(iter(each.schemes)): each for each in map(backend_of, _examples())}


def queues_url(backend: Backend) -> str:
    """An address for queues that no other test uses, with a port that the system chooses."""
    scheme, example = next(iter(backend.schemes.items()))
    return SERVERS[scheme]() if scheme in SERVERS else re.sub(r":\d+$", ":0", example)


def broker_url(backend: Backend) -> str:
    """An address for a broker that no other test uses; what is in a folder is in /tmp, where paths are short."""
    url = queues_url(backend)
    if backend.has_server:
        return f"{url}#desk"
    return url if backend.host(url) or next(iter(backend.schemes)) in SERVERS else f"{url}-test-{secrets.token_hex(6)}"


def _examples() -> list[str]:
    return [each.schemes[scheme] for scheme, each in transports().items()]
