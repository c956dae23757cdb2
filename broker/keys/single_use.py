"""Keys of which each seals one text, so that all may have the same iv (AES-256-GCM, NIST SP 800-38D).

    secret ──HKDF, context──> root ──HKDF-Expand, salt──> key          (RFC 5869)

A root has a key for each salt, and 24 random bytes do not come twice.
"""

from collections.abc import Callable
from typing import TypeAlias

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

SALT = 24  # random bytes of which a key is made
TAG = 16  # bytes by which what is sealed is longer
_KEY = 32  # bytes
_IV = bytes(12)

RandomBytes: TypeAlias = Callable[[int], bytes]
"""Function that returns as many random bytes as it is asked for, `os.urandom`."""


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
