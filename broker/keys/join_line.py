"""Join line: the text with which a machine joins a run.

    tcp://desk:7000#k1.<public key of the broker>.<secret of an invitation>.<check>

The check finds mistyped characters; it proves nothing to the broker. Without secret and check, which is what remains
once a machine has enrolled, this is a keyed address.
"""

import re
from base64 import b32encode
from dataclasses import dataclass, field
from hashlib import blake2b

from stageline.broker.errors import BadJoinLine, BadKey
from stageline.pipeline import addresses

from .pairs import JOIN_SECRET_BYTES, KEY_SIGNS, VERSION, PublicKey, decoded, encoded

_SECRET_SIGNS = 22
_CHECK_SIGNS = 6
_PARTS = (KEY_SIGNS, _SECRET_SIGNS, _CHECK_SIGNS)  # characters of each part after the version

_LINE = re.compile(r"(?P<address>.*)#k(?P<version>\d*)(?:\.(?P<parts>.*))?", re.DOTALL)
_COPY = "Copy the whole line that the broker printed, in single quotes"


@dataclass(frozen=True, slots=True)
class JoinLine:
    """Text by which a machine joins.

    Attributes:
        address: Address of the broker.
        broker: Public key of the broker.
        secret: Secret of the invitation, 16 bytes; `invite_pair` makes a key pair of it.
    """

    address: str
    broker: PublicKey
    secret: bytes = field(repr=False)

    @property
    def text(self) -> str:
        """The line, with a check at its end by which `parse` finds a mistyped character."""
        line = f"{self.address}#{self.broker.text}.{encoded(self.secret)}"
        return f"{line}.{_check(line)}"

    @classmethod
    def parse(cls, text: str) -> "JoinLine":
        """Return the line that `text` is, but for white space around it.

        Raises `BadJoinLine`: without an address or a key part, of another version, cut off, or mistyped.
        """
        line = text.strip()
        found = _LINE.fullmatch(line)
        if found is None:
            raise _refusal(line, f"has no key part after #. {_COPY}")
        parts = (found["parts"] or "").split(".")
        if found["version"] and f"k{found['version']}" != VERSION:
            raise _refusal(
                line,
                f"is of version k{found['version']}, this side has {VERSION}. Install the same version of stageline on "
                "every machine",
            )
        if len(parts) < len(_PARTS) or any(len(part) < signs for part, signs in zip(parts, _PARTS, strict=False)):
            raise _refusal(line, f"is cut off: {_lacking(parts)}. {_COPY}")
        place, key = addresses.parted(found["address"])
        if key or addresses.fault(place, addresses.broker_schemes()) is not None:
            raise _refusal(line, f"has no address of a broker before its #, such as tcp://desk:7000. {_COPY}")
        return cls._checked(line, found["address"], parts)

    @classmethod
    def _checked(cls, line: str, address: str, parts: list[str]) -> "JoinLine":
        """Return the line of these parts, none of which is too short. Raises `BadJoinLine`."""
        secret = decoded(parts[1], JOIN_SECRET_BYTES)
        if len(parts) == len(_PARTS) and parts[2] == _check(line.rpartition(".")[0]) and secret is not None:
            try:
                return cls(address, PublicKey.parse(f"{VERSION}.{parts[0]}"), secret)
            except BadKey as error:
                raise _refusal(line, f"has a wrong key: {error}") from error
        raise _refusal(line, f"is mistyped: the check at its end does not fit what is before it. {_COPY}")


def keyed(address: str, key: PublicKey) -> str:
    """Return the address, which has no key, with the public `key` of what listens there."""
    return f"{address}#{key.text}"


def split_key(url: str) -> tuple[str, PublicKey | None]:
    """Return an address without the key that it ends with, and that key; None for an address without one.

    Raises `BadKey`, which shows nothing of what may be a secret.
    """
    address, text = addresses.parted(url)
    if text.count(".") == len(_PARTS):
        raise BadKey(
            f"{addresses.masked(url)} is a join line, with a secret at its end, where an address is expected: give it "
            "to `stageline worker --join`"
        )
    return address, PublicKey.parse(text) if text else None


def _refusal(line: str, reason: str) -> BadJoinLine:
    """Return the error for `line`, of which nothing from # on is shown: a secret may stand anywhere in it."""
    address, sign, _ = line.partition("#")
    shown = f"{addresses.masked(address)}{'#...' if sign else ''} " if "://" in address else ""
    return BadJoinLine(f"the join line {shown}{reason}")


def _lacking(parts: list[str]) -> str:
    """Return what the parts of a line that was cut off lack."""
    for part, signs, name in zip([*parts, "", ""], _PARTS, ("broker's key", "secret", "check"), strict=False):
        if len(part) < signs:
            return f"its {name} has {len(part)} characters, expected {signs}"
    raise AssertionError(parts)


def _check(line: str) -> str:
    """Return the check of a line without one, 6 characters: 30 bits of its digest."""
    digest = blake2b(line.encode(), digest_size=5, person=b"stageline join").digest()
    return b32encode(digest).decode().lower()[:_CHECK_SIGNS]
