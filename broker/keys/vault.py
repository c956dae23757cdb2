"""Vault: values that one process leaves with a server for itself, sealed with a secret that it does not share.

    value    salt, 24 random bytes | the text, sealed

Each value has a key of its own, derived from the secret, the context and the salt (HKDF, RFC 5869; AES-256-GCM). Its
name is associated data, so that it opens under that name alone. An older value under the same name does open.
"""

from collections.abc import Sequence

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from stageline.broker.errors import BadMessage

from .single_use import SALT, TAG, RandomBytes, key_of, opened, root_of, sealed

_CHECK = 8


class Vault:
    """Maker and opener of the sealed values of one context."""

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
