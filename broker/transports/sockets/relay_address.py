"""Addresses of relays.

    relay://k1.<relay's key>:<secret of admission>@relay.example:7443            where queues or a broker may be
    relay://k1.<relay's key>:<secret of admission>@relay.example:7443#k1.<key>   where one of them is

The secret stands where a password does, and is masked as one. Brokers of one key have names: ...:7443/scans
"""

import re
from dataclasses import dataclass, field, replace

from stageline.broker.errors import BadKey
from stageline.broker.keys.pairs import PublicKey, decoded, encoded
from stageline.pipeline.addresses import parted

ADMISSION_BYTES = 16
SCHEME = "relay://"
LOCAL = "tcp://127.0.0.1:0"  # where a socket listens whose peers come through a relay
FORM = "relay://k1.<key>:<secret>@relay.example:7443"

_LINE = "the line that `stageline relay` printed"
_FORM = re.compile(
    r"relay://(?:(?P<key>[^:@/]*)(?P<secret>:[^@/]*)?@)?(?P<host>\[[0-9a-fA-F:.]+]|[^\s:/@\[\]]+):(?P<port>\d+)(?P<name>/[\w.-]{0,64})?"
)


def port_of(endpoint: str) -> int:
    """Return the port of an address at 127.0.0.1, keyed or not."""
    return int(parted(endpoint)[0].rpartition(":")[2])


@dataclass(frozen=True, slots=True)
class RelayAddress:
    """Place of a relay, with what it takes to be admitted there.

    Attributes:
        host: Host of the relay, an IPv6 address in its brackets.
        port: Port of the relay.
        key: Public key of the relay.
        name: Name by which processes of one key differ.
        secret: Secret of admission, 16 bytes; b"" in an address that goes to others.
    """

    host: str
    port: int
    key: PublicKey
    name: str = ""
    secret: bytes = field(default=b"", repr=False)

    @classmethod
    def parse(cls, url: str) -> "RelayAddress":
        """Return the address in `url`, which names no peer. Raises `BadKey`, which shows no secret."""
        found = _FORM.fullmatch(url)
        if found is None or not 0 < int(found["port"]) < 65536:
            raise BadKey(f"an address of a relay has a key, a secret, a host and a port, as in {FORM}: copy {_LINE}")
        if not found["key"]:
            raise BadKey(f"the relay's key is missing, as in {FORM}: copy {_LINE}")
        try:
            key = PublicKey.parse(found["key"])
        except BadKey as error:
            raise BadKey(f"the relay's key is damaged: {error}") from error
        signs = (found["secret"] or "").removeprefix(":")
        secret = decoded(signs, ADMISSION_BYTES) if found["secret"] else b""
        if secret is None:
            raise BadKey(f"the relay's secret of admission has {len(signs)} characters or a wrong one: copy {_LINE}")
        return cls(found["host"], int(found["port"]), key, (found["name"] or "").removeprefix("/"), secret)

    @property
    def url(self) -> str:
        """The address as `parse` reads it."""
        secret = f":{encoded(self.secret)}" if self.secret else ""
        return f"{SCHEME}{self.key.text}{secret}@{self.place}{self.name and '/' + self.name}"

    @property
    def place(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    @property
    def shared(self) -> "RelayAddress":
        """The address without the secret, for others who have that already."""
        return replace(self, secret=b"")
