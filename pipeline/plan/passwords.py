"""Hides the passwords in addresses: every address that is shown, kept or sent goes through here.

redis://trainer:secret@host:6379/0?ssl_password=more  ->  redis://trainer@host:6379/0
"""

import re
from collections.abc import Mapping
from urllib.parse import unquote_plus, urlsplit

ADDRESSES = ("queues.url", "broker.url", "broker.store")  # the keys of a plan that hold them

_LOCAL = ("ipc", "memory")  # what follows is a path, and may hold any sign
_SECRET = re.compile("pass|pwd|secret|token|auth", re.IGNORECASE)  # in the name of an option after `?`
_ESCAPE = "write / ? # and @ in a user or password as %2F %3F %23 %40"


def fault(url: str) -> str | None:
    """What makes it unclear where in `url` the password ends; None if nothing does."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # it would quote what may be a password
        return f"host and port cannot be told apart: a port is 0 to 65535, an IPv6 address stands in []; {_ESCAPE}"
    rest = parts.path + parts.fragment + (parts.query if parts.netloc else "")
    if "@" in rest:
        return f"user and password stand before the host; {_ESCAPE}"
    return None


def masked(text: str) -> str:
    """An address without its password, and without any option that holds one; other text as it is.

    Where it is not clear what the password is, nothing but the kind of address is left.
    """
    scheme, separator, _ = text.partition("://")
    if not separator or scheme in _LOCAL or (scheme == "tcp" and "@" not in text):
        return text
    if fault(text) is not None:
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
