"""Public keys and key pairs of X25519 (RFC 7748), by which the broker, workers and parties are known.

ZeroMQ's CURVE takes these keys as they are: 32 bytes each.

    k1.2n8Fh0XQb5...   the text of a public key: the version, and base64url without padding
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, field
from hashlib import blake2b

from stageline.broker.errors import BadKey

PUBLIC_BYTES = SECRET_BYTES = 32
VERSION = "k1"
JOIN_SECRET_BYTES = 16
KEY_SIGNS = 43  # characters of a key in base64url
SHORT = 11  # characters of a key's text that are shown to people

_SIGNS = re.compile(r"[A-Za-z0-9_-]*")
_FIELD = 2**255 - 19
_COEFFICIENT = 486662  # of the curve: v^2 = u^3 + 486662 u^2 + u
# Points whose multiples are known to all: a secret that is agreed on with one of them is none.
_SMALL = {
    0,
    1,
    _FIELD - 1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
}


@dataclass(frozen=True, slots=True)
class PublicKey:
    """Public key of a broker, a worker or a party.

    Attributes:
        raw: The key, 32 bytes.
    """

    raw: bytes

    @classmethod
    def parse(cls, text: str) -> "PublicKey":
        """Return the key with this `text`. Raises `BadKey`, which names the first thing wrong with it."""
        version, dot, signs = text.partition(".")
        if not dot or version != VERSION:
            raise BadKey(f"{_shown(text)} is not a public key: it begins with {_shown(version)}, expected {VERSION}.")
        raw = decoded(signs, PUBLIC_BYTES)
        if raw is None or not _is_point(int.from_bytes(raw, "little")):
            raise BadKey(f"{_shown(text)} is not a public key: {_fault(signs)}. Copy it again")
        return cls(raw)

    @classmethod
    def received(cls, raw: bytes) -> "PublicKey":
        """Return the key of 32 bytes that another process has sent. Raises `BadKey` unless they are those of a key."""
        return cls.parse(cls(raw).text)

    @property
    def text(self) -> str:
        """The key as people copy it, 46 characters."""
        return f"{VERSION}.{encoded(self.raw)}"

    @property
    def short(self) -> str:
        """The beginning of the key's text, by which people tell keys apart; others may begin with the same."""
        return short(self.text)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Public key with its secret.

    Attributes:
        public: Public key.
        secret: Secret key, 32 bytes.
    """

    public: PublicKey
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> "KeyPair":
        """Return a new pair, with a secret from the system's random numbers."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey  # 30 ms, of runs with keys alone

        return cls.of_secret(X25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def of_secret(cls, secret: bytes) -> "KeyPair":
        """Return the pair of a secret key of 32 bytes, any bytes. Raises `ValueError` for another length."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        return cls(PublicKey(X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()), secret)

    def agreed(self, peer: bytes) -> bytes:
        """Return 32 bytes that only the owners of this pair and of the raw key `peer` can make.

        Raises `ValueError` for a peer's key with which all can make them.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

        return X25519PrivateKey.from_private_bytes(self.secret).exchange(X25519PublicKey.from_public_bytes(peer))


def invite_pair(secret: bytes) -> KeyPair:
    """Return the pair that the `secret` of a join line stands for: the broker and the worker both derive it."""
    return KeyPair.of_secret(blake2b(secret, digest_size=SECRET_BYTES, person=b"stageline invite").digest())


def operator_pair(own: KeyPair) -> KeyPair:
    """Return the pair by which commands of who has the broker's `own` key file speak to that broker."""
    return KeyPair.of_secret(blake2b(own.secret, digest_size=SECRET_BYTES, person=b"stageline operat").digest())


def invitation_secret(own: KeyPair, run: str, serial: int) -> bytes:
    """Return the secret of an invitation, which a broker derives again as often as it needs it, and does not keep.

    Args:
        own: Pair of the broker.
        run: Id of the run.
        serial: Number of the invitation in the run, from 0 on.

    Returns:
        16 bytes, for a join line.
    """
    place = serial.to_bytes(8, "big") + run.encode()
    return blake2b(place, key=own.secret, digest_size=JOIN_SECRET_BYTES, person=b"stageline invtn").digest()


def encoded(raw: bytes) -> str:
    """Return `raw` in base64url without padding."""
    return urlsafe_b64encode(raw).rstrip(b"=").decode()


def decoded(signs: str, size: int) -> bytes | None:
    """Return the `size` bytes whose base64url without padding is `signs`; None if `signs` is not that of any."""
    if not _SIGNS.fullmatch(signs) or len(signs) % 4 == 1:
        return None
    raw = urlsafe_b64decode(signs + "=" * (-len(signs) % 4))
    return raw if len(raw) == size and encoded(raw) == signs else None  # one text for a key, not four


def _is_point(u: int) -> bool:
    """Return True if `u` may be a public key: the reduced coordinate of a point on the curve, not of small order."""
    square = u * (u * u + _COEFFICIENT * u + 1) % _FIELD
    return u < _FIELD and u not in _SMALL and pow(square, _FIELD // 2, _FIELD) == 1


def _fault(signs: str) -> str:
    """Return why `signs` is not the base64url of a key."""
    if wrong := _SIGNS.sub("", signs, count=1):
        return f"it has {wrong[0]!r} in it, expected letters, digits, - and _"
    if len(signs) != KEY_SIGNS:
        return f"it has {len(signs)} characters after {VERSION}., expected {KEY_SIGNS}"
    return "no secret key leads to it, so that a character of it is another than it was"


def short(text: str) -> str:
    """Return the beginning of a key's `text`, for people: `k1.2n8Fh0XQ...`."""
    return text if len(text) <= SHORT else f"{text[:SHORT]}..."


def _shown(text: str) -> str:
    """Return the beginning of `text`, quoted: it may be long, and a secret that was taken for a public key."""
    return repr(short(text))
