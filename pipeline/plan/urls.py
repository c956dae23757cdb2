"""The addresses a plan may name: which backends there are, and who can reach what listens there."""

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from . import passwords

# Scheme -> how such an address looks. A new backend in broker/queues/ joins the first.
REDIS = {
    "redis": "redis://127.0.0.1:6379/0",
    "rediss": "rediss://user:password@host:6379/0",
    "unix": "unix:///run/redis.sock",
}
QUEUES = {"memory": "memory://", "ipc": "ipc://", "tcp": "tcp://127.0.0.1:5600", **REDIS}
BROKER = {"ipc": "ipc:///tmp/stageline", "tcp": "tcp://127.0.0.1:5600", **REDIS}

_TCP = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+]|[^\s:/\[\]]+):(?P<port>\d+|\*)")


def fault(url: str, schemes: Collection[str]) -> str | None:
    """What keeps `url` from being an address of one of `schemes`, "" if that needs no words; None if it is one."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in schemes:
        return ""
    match scheme:
        case "tcp":
            return _tcp_fault(rest)
        case "redis" | "rediss" | "unix":
            return passwords.fault(url) or _redis_fault(url)
        case _:
            return None


def open_to_others(url: str) -> bool:
    """Whether whatever listens at `url` can be reached from other machines."""
    found = _TCP.fullmatch(url.removeprefix("tcp://"))
    if not url.startswith("tcp://") or found is None:
        return False
    host = found["host"].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or `*`: every interface
        return host != "localhost"


def _redis_fault(url: str) -> str | None:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return None if parts.path else "the path of a socket is missing"
    if not parts.hostname:
        return "a host is missing"
    if not re.fullmatch(r"(/\d*)?", parts.path):
        return f"what follows the host, {parts.path!r}, is not the number of a database"
    return None


def _tcp_fault(rest: str) -> str | None:
    found = _TCP.fullmatch(rest)
    if found is None:
        return "tcp:// goes with a host and a port"
    if found["port"] != "*" and int(found["port"]) > 65535:
        return "a port is at most 65535"
    return None
