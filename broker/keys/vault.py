"""Vault: values that one process leaves with a server for itself, sealed with a secret that it does not share.

    value    salt, 24 random bytes | the text, sealed

Each value has a key of its own, derived from the secret, the context and the salt (HKDF, RFC 5869; AES-256-GCM). Its
name is associated data, so that it opens under that name alone. An older value under the same name does open.
"""

from collections.abc import Callable, Sequence

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from stageline.broker.errors import BadMessage

SALT = 24
_TAG = 16
_CHECK = 8
_IV = bytes(12)  # each key seals one value


class Vault:
    """Maker and opener of the sealed values of one context."""

    def __init__(self, secret: bytes, context: Sequence[str], random: Callable[[int], bytes]) -> None:
        """Derive the root of all keys.

        Args:
            secret: Secret of the process, that of a key pair for example. It cannot be inferred from what is sealed.
            context: Names of what the values belong to: another context has other keys.
            random: Source of salts, `os.urandom`.
        """
        named = msgspec.msgpack.encode(("stageline vault", 1, *context))
        self._root = HKDF(SHA256(), 32, None, named).derive(secret)
        self._random = random

    @property
    def check(self) -> str:
        """16 hexadecimal digits by which vaults of other secrets or contexts are told apart."""
        return HKDFExpand(SHA256(), _CHECK, b"check").derive(self._root).hex()

    def seal(self, name: bytes, text: bytes) -> bytes:
        """Return `text`, sealed under a name."""
        salt = self._random(SALT)
        return salt + self._cipher(salt).encrypt(_IV, text, name)

    def open(self, name: bytes, sealed: bytes) -> bytes:
        """Return a text that was sealed under this name. Raises `BadMessage`."""
        if len(sealed) < SALT + _TAG:
            raise BadMessage(f"{len(sealed)} bytes are no sealed value")
        try:
            return self._cipher(sealed[:SALT]).decrypt(_IV, sealed[SALT:], name)
        except InvalidTag as error:
            raise BadMessage("a value cannot be opened: it is damaged, of another name, or of another key") from error

    def _cipher(self, salt: bytes) -> AESGCM:
        return AESGCM(HKDFExpand(SHA256(), 32, salt).derive(self._root))
