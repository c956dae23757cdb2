"""Addresses, and the transports that their schemes choose.

Each file or folder in `broker/transports/` registers its transports. All are imported when the first one is asked for;
none loads what it needs to open a connection (redis-py, ZeroMQ, torch) before one is opened.

Every address that is shown, kept or sent goes through `masked`:

    redis://trainer:secret@host:6379/0?ssl_password=more  ->  redis://trainer@host:6379/0
    tcp://desk:7000#k1.<key>.<secret>.<check>             ->  tcp://desk:7000#k1...

An address may end with the public key of what listens there, `tcp://desk:7000#k1.<key>`: such an address is keyed.
"""

import ipaddress
import re
from collections.abc import Collection, Mapping
from enum import IntEnum
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import ClassVar
from urllib.parse import unquote_plus, urlsplit

_TRANSPORTS = "stageline.broker.transports"
EVERY_INTERFACE = ("0.0.0.0", "[::]", "*")  # noqa: S104 - to be looked for, not bound
_SECRET = re.compile("pass|pwd|secret|token|auth", re.IGNORECASE)  # in the name of an option after `?`
_KEYS = re.compile(r"#(k\d+)\.\S*", re.IGNORECASE)  # the part of a join line that has a secret
_KEYED = re.compile(r"(.*)#(k\d+\.[^#]*)", re.DOTALL)
_ESCAPE = "write / ? # and @ in a user or password as %2F %3F %23 %40"


class Reach(IntEnum):
    """Set of processes between which a transport carries messages."""

    PROCESS = 0
    MACHINE = 1
    NETWORK = 2


class Transport:
    """Way in which messages travel, with the facts about it; `broker/transports/base.py` has what opens it.

    Attributes:
        schemes: Example of an address, by the scheme that such an address begins with.
        reach: Processes between which it carries messages.
        has_server: True if all meet at a server at the address; False if each worker listens at an endpoint of its own.
        is_shared: True if the broker and the queues of all workers can have one address: that of a server or a relay.
        invites: True if a password in an address is meant for all who join a run there, and may stand in their line.
        in_folder: True if the queues of a worker listen in its folder: their address is the scheme alone.
        carries_control: True if the broker can be found at such an address.
        keeps_records: True if the broker can keep its records at such an address.
    """

    schemes: ClassVar[Mapping[str, str]] = MappingProxyType({})
    reach = Reach.NETWORK
    has_server = False
    is_shared = False
    invites = False
    in_folder = False
    carries_control = False
    keeps_records = False

    def fault(self, url: str) -> str | None:
        """Return why `url`, of one of the schemes, is not valid; None if it is valid, "" if there are no schemes."""
        return None if self.schemes else ""

    def host(self, url: str) -> str:
        """Return the host that a process at `url` listens at, "" if it listens at none."""
        return ""

    def has_free_port(self, url: str) -> bool:
        """Return True if the system chooses the port at `url`, so that others cannot dial it."""
        return False

    def crosses(self, url: str) -> bool:
        """Return True if what is sent to or from a process at the valid `url` may leave this machine."""
        host = self.host(url)
        return bool(host) and is_elsewhere(host.strip("[]"))

    def lacking(self, url: str) -> tuple[str, ...]:
        """Return the protections, of "a password" and "TLS", that the server at the valid `url` is used without."""
        return ()

    def hides(self, url: str) -> bool:
        """Return True if `url` may have a password."""
        return True


_UNKNOWN = Transport()
_registered: dict[str, Transport] = {}


def register(transport: Transport) -> None:
    """Make `transport` the transport of its schemes."""
    _registered.update(dict.fromkeys(transport.schemes, transport))
    transports.cache_clear()


@cache
def transports() -> Mapping[str, Transport]:
    """Return all transports by their schemes, those that reach least first."""
    room = import_module(_TRANSPORTS)
    for found in iter_modules(room.__path__):
        import_module(f"{_TRANSPORTS}.{found.name}")
    return dict(sorted(_registered.items(), key=lambda item: (item[1].reach, item[1].has_server)))


def transport_of(url: str) -> Transport:
    """Return the transport of `url`; one without schemes if its scheme is not registered."""
    return transports().get(url.partition("://")[0], _UNKNOWN)


def queue_schemes() -> Mapping[str, str]:
    """Return the schemes of addresses of queues, each with an example."""
    found = transports().items()
    return {scheme: f"{scheme}://" if each.in_folder else each.schemes[scheme] for scheme, each in found}


def broker_schemes() -> Mapping[str, str]:
    """Return the schemes of addresses of a broker, each with an example."""
    return {scheme: each.schemes[scheme] for scheme, each in transports().items() if each.carries_control}


def store_schemes() -> Mapping[str, str]:
    """Return the schemes of addresses of a store of the broker's records, each with an example."""
    return {scheme: each.schemes[scheme] for scheme, each in transports().items() if each.keeps_records}


def fault(url: str, schemes: Collection[str]) -> str | None:
    """Return why `url` is not a valid address for `schemes`; None if it is valid, "" if its scheme is not in them."""
    scheme, separator, _ = url.partition("://")
    return transport_of(url).fault(url) if separator and scheme in schemes else ""


def parted(url: str) -> tuple[str, str]:
    """Return an address without the key that it ends with, and the text of that key: "" for an address without one."""
    found = _KEYED.fullmatch(url)
    return (url, "") if found is None else (found[1], found[2])


def open_to_others(url: str) -> bool:
    """Return True if a process that listens at `url` can be reached from other machines."""
    return bool(host_of(url)) and transport_of(url).crosses(url)


def needs_keys(url: str, *, insecure: bool = False) -> bool:
    """Return True if a broker at `url`, and those who dial it, have keys: what they say may leave this machine.

    Args:
        url: Address of the broker, also one of a server at which it is met.
        insecure: `broker.insecure` of the plan: keys are renounced.
    """
    transport = transport_of(url)
    return not insecure and transport.fault(url) is None and transport.crosses(url)


def lacking_protection(url: str) -> tuple[str, ...]:
    """Return the protections, of "a password" and "TLS", that the server at `url` is used without.

    Nothing is lacking for a Unix socket or a loopback address, or if `url` is not the address of a server. A client
    certificate counts as a password.
    """
    transport = transport_of(url)
    return transport.lacking(url) if transport.fault(url) is None else ()


def host_of(url: str) -> str:
    """Return the host that a process at `url` listens at, "" if it listens at no host."""
    return transport_of(url).host(url)


def dialled(url: str, host: str = "127.0.0.1") -> str:
    """Return `url` as others dial it: `host` stands in place of all interfaces of a machine. A key stays at its end."""
    there = host_of(url)
    return url.replace(f"://{there}:", f"://{host}:", 1) if there in EVERY_INTERFACE else url


def masked(text: str) -> str:
    """Return an address without its password, and without any option that holds one; other text as it is.

    Only the scheme is left if it is not clear where the password ends. Of the keys of a join line, also within other
    text, only the version is left.
    """
    text = _KEYS.sub(r"#\1...", text)
    scheme, separator, _ = text.partition("://")
    if not separator or not transport_of(text).hides(text):
        return text
    if unclear_password(text) is not None:
        return f"{scheme}://..."
    parts = urlsplit(text)
    user, at, host = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    options = "&".join(
        each for each in parts.query.split("&") if not _SECRET.search(unquote_plus(each.partition("=")[0]))
    )
    fragment = f"#{parts.fragment}" if parts.fragment else ""
    return f"{scheme}://{name}{at if name else ''}{host}{parts.path}{'?' if options else ''}{options}{fragment}"


def is_showable(line: str) -> bool:
    """Return True if a join line may be shown: it has no password, or one that is meant for all who join."""
    address, _ = parted(line)
    return masked(address) == address or transport_of(address).invites


def all_masked(value: object) -> object:
    """Return `value`, of JSON's own types, with every address in it masked."""
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
    """Return why it is not clear where in `url` the password ends; None if it is clear."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # it would quote what may be a password
        return f"host and port cannot be told apart: a port is 0 to 65535, an IPv6 address stands in []; {_ESCAPE}"
    rest = parts.path + parts.fragment + (parts.query if parts.netloc else "")
    return f"user and password stand before the host; {_ESCAPE}" if "@" in rest else None


def is_elsewhere(host: str) -> bool:
    """Return True if `host` may be another machine: it is not a loopback address or localhost.

    Any other name, and `*` (every interface), count as other machines.
    """
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
