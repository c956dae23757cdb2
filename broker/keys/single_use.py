"""Keys of which each seals one text, so that all may have the same iv (AES-256-GCM, NIST SP 800-38D).

    secret ──HKDF, context──> root ──HKDF-Expand, salt──> key          (RFC 5869)

A root has a key for each salt, and 24 random bytes do not come twice. A `Vault` seals values so for a server.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from stageline.broker.errors import BadMessage

SALT = 24  # random bytes of which a key is made
TAG = 16  # bytes by which what is sealed is longer
_KEY = 32  # bytes
_IV = bytes(12)

RandomBytes: TypeAlias = Callable[[int], bytes]
"""Function that returns as many random bytes as it is asked for, `os.urandom`."""
_CHECK = 8


def root_of(secret: bytes, context: bytes) -> bytes:
    """Return the root of the keys for `context`; that of another context tells nothing about it."""
    return HKDF(SHA256(), _KEY, None, context).derive(secret)


def key_of(root: bytes, salt: bytes) -> bytes:
    """Return the key of a root and a salt."""
    return HKDFExpand(SHA256(), _KEY, salt).derive(root)


def sealed(key: bytes, data: bytes, content: bytes = b"") -> bytes:
    """Return `content`, sealed with a key of its own and with the associated `data`."""
    return AESGCM(key).encrypt(_IV, content, data)


def opened(key: bytes, data: bytes, sealed: bytes) -> bytes:
    """Return what was sealed. Raises `InvalidTag`."""
    return AESGCM(key).decrypt(_IV, sealed, data)


class Vault:
    """Maker and opener of values that one process leaves with a server for itself, in one context.

        value    salt, 24 random bytes | the text, sealed

    The secret is shared with no other process. A name is associated data, so that a value opens under it alone. An
    older value under the same name does open.
    """

    def __init__(self, secret: bytes, context: Sequence[str], random: RandomBytes) -> None:
        """Derive the root of all keys.

        Args:
            secret: Secret of the process, that of a key pair for example. It cannot be inferred from what is sealed.
            context: Names of what the values belong to: another context has other keys.
            random: Source of salts, `os.urandom`.
        """
        self._root = root_of(secret, msgspec.msgpack.encode(("stageline vault", 1, *context)))
        self._random = random

    @property
    def check(self) -> str:
        """16 hexadecimal digits by which vaults of other secrets or contexts are told apart."""
        return HKDFExpand(SHA256(), _CHECK, b"check").derive(self._root).hex()

    def seal(self, name: bytes, text: bytes) -> bytes:
        """Return `text`, sealed under a name."""
        salt = self._random(SALT)
        return salt + sealed(key_of(self._root, salt), name, text)

    def open(self, name: bytes, value: bytes) -> bytes:
        """Return a text that was sealed under this name. Raises `BadMessage`."""
        if len(value) < SALT + TAG:
            raise BadMessage(f"{len(value)} bytes are no sealed value")
        try:
            return opened(key_of(self._root, value[:SALT]), name, value[SALT:])
        except InvalidTag as error:
            raise BadMessage("a value cannot be opened: it is damaged, of another name, or of another key") from error
