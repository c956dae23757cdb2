"""The addresses a plan may name: which backends there are, which addresses other machines can reach, and how
passwords are hidden. Every address that is shown, kept or sent goes through `masked`.

redis://trainer:secret@host:6379/0?ssl_password=more  ->  redis://trainer@host:6379/0
"""

import ipaddress
import re
import sys
from collections.abc import Collection, Mapping
from urllib.parse import parse_qs, unquote_plus, urlsplit

# Scheme -> how such an address looks. A new backend in broker/queues/ joins the first.
REDIS = {
    "redis": "redis://127.0.0.1:6379/0",
    "rediss": "rediss://user:password@host:6379/0",
    "unix": "unix:///run/redis.sock",
}
QUEUES = {"memory": "memory://", "shm": "shm://", "ipc": "ipc://", "tcp": "tcp://127.0.0.1:5600", **REDIS}
LOCAL_QUEUES = QUEUES["shm" if sys.platform == "linux" else "ipc"]  # the fastest between processes of one machine
BROKER = {"ipc": "ipc:///tmp/stageline", "tcp": "tcp://127.0.0.1:5600", **REDIS}

EVERY_INTERFACE = ("0.0.0.0", "[::]", "*")  # noqa: S104 - to be looked for, not bound
_TCP = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+]|[^\s:/\[\]]+):(?P<port>\d+|\*)")
_LOCAL = ("shm", "ipc", "memory")  # what follows is a path, and may hold any sign
_SECRET = re.compile("pass|pwd|secret|token|auth", re.IGNORECASE)  # in the name of an option after `?`
_ESCAPE = "write / ? # and @ in a user or password as %2F %3F %23 %40"


def fault(url: str, schemes: Collection[str]) -> str | None:
    """What keeps `url` from being an address of one of `schemes`, "" if it is of none; None if it is one."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in schemes:
        return ""
    match scheme:
        case "tcp":
            return _tcp_fault(rest)
        case "redis" | "rediss" | "unix":
            return unclear_password(url) or _redis_fault(url)
        case _:
            return None


def open_to_others(url: str) -> bool:
    """Whether what listens at `url` can be reached from other machines."""
    found = _TCP.fullmatch(url.removeprefix("tcp://"))
    if not url.startswith("tcp://") or found is None:
        return False
    return _is_elsewhere(found["host"].strip("[]"))


def lacking_protection(url: str) -> tuple[str, ...]:
    """Return what the Redis server at `url` is used without, of "a password" and "TLS".

    Nothing is lacking for a Unix socket or a loopback address, or if the address is not one of Redis. A client
    certificate counts as a password.
    """
    scheme, _, _ = url.partition("://")
    if scheme not in ("redis", "rediss") or fault(url, REDIS) is not None:
        return ()
    parts = urlsplit(url)
    if not _is_elsewhere(parts.hostname or ""):
        return ()
    proofs = ("password", "ssl_certfile") if scheme == "rediss" else ("password",)
    is_proven = bool(parts.password or any(parse_qs(parts.query).get(each) for each in proofs))
    return (*(() if is_proven else ("a password",)), *(() if scheme == "rediss" else ("TLS",)))


def host_of(url: str) -> str:
    """The host of a tcp:// address, "" of another."""
    return url.removeprefix("tcp://").rpartition(":")[0] if url.startswith("tcp://") else ""


def dialled(url: str, host: str = "127.0.0.1") -> str:
    """`url` as it is dialled: one at all interfaces of a machine, which is found at `host`."""
    return f"tcp://{host}:{url.rpartition(':')[2]}" if host_of(url) in EVERY_INTERFACE else url


def masked(text: str) -> str:
    """An address without its password, and without any option that holds one; other text as it is.

    Where it is not clear what the password is, nothing but the kind of address is left.
    """
    scheme, separator, _ = text.partition("://")
    if not separator or scheme in _LOCAL or (scheme == "tcp" and "@" not in text):
        return text
    if unclear_password(text) is not None:
        return f"{scheme}://..."
    parts = urlsplit(text)
    user, at, host = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    options = "&".join(each for each in parts.query.split("&") if not _SECRET.search(unquote_plus(each.split("=")[0])))
    fragment = f"#{parts.fragment}" if parts.fragment else ""
    return f"{scheme}://{name}{at if name else ''}{host}{parts.path}{'?' if options else ''}{options}{fragment}"


def all_masked(value: object) -> object:
    """`value`, of JSON's own types, with every address in it masked."""
    match value:
        case str():
            return masked(value)
        case list() | tuple():
            return [all_masked(each) for each in value]
        case Mapping():
            return {name: all_masked(each) for name, each in value.items()}
        case _:
            return value


def unclear_password(url: str) -> str | None:
    """What makes it unclear where in `url` the password ends; None if nothing does."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # it would quote what may be a password
        return f"host and port cannot be told apart: a port is 0 to 65535, an IPv6 address stands in []; {_ESCAPE}"
    rest = parts.path + parts.fragment + (parts.query if parts.netloc else "")
    return f"user and password stand before the host; {_ESCAPE}" if "@" in rest else None


def _is_elsewhere(host: str) -> bool:
    """Return False for a loopback address. A name other than localhost, and `*` (every interface), count as others."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
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
