"""Secret key under a passphrase, as a key file has it: a word that anyone may read, of no use without it.

    k1-encrypted.<base64url>    log2 of n | r | p | salt, 16 bytes | public key, 32 bytes | secret key, sealed, 48 bytes

The key of the seal is made of the passphrase and the salt (scrypt, RFC 7914); all that is not sealed is associated data
(AES-256-GCM). How much memory and time scrypt takes stands in the word, so it is bounded before any is allocated.
"""

import os
from dataclasses import dataclass, field
from struct import Struct

from stageline.broker.keys.pairs import PUBLIC_BYTES, SECRET_BYTES, VERSION, KeyPair, PublicKey, decoded, encoded

PREFIX = f"{VERSION}-encrypted."
MOST_MEMORY = 2**28  # bytes that opening a key may take
COST = (16, 8, 2)  # log2 of n, r and p: 64 MiB, and about 0.3 s
_MOST_LANES = 16
_LEAST_COST = 14  # of log2 of n: what is less is guessed too fast
_SALT, _TAG, _KEY = 16, 16, 32
_START = Struct(f">BBB{_SALT}s{PUBLIC_BYTES}s")
_SIZE = _START.size + SECRET_BYTES + _TAG
_SIGNS = -(-_SIZE * 4 // 3)  # characters after the prefix
_IV = bytes(12)  # a salt makes a key for one seal


class WrongPassphrase(Exception):
    """Error that a passphrase does not open a key."""


class BadLockedKey(Exception):
    """Error that a text is not that of a locked key; it says why, as the end of a sentence about the file."""


@dataclass(frozen=True, slots=True)
class LockedKey:
    """Key pair whose secret is sealed with a passphrase.

    Attributes:
        public: Public key.
        cost: Parameters of scrypt: log2 of n, r and p.
        salt: Bytes that make the same passphrase another key in each file.
        sealed: Sealed secret key.
    """

    public: PublicKey
    cost: tuple[int, int, int]
    salt: bytes = field(repr=False)
    sealed: bytes = field(repr=False)

    @classmethod
    def lock(cls, pair: KeyPair, passphrase: bytes) -> "LockedKey":
        """Return `pair` under a passphrase."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # 12 ms, of encrypted files alone

        empty = cls(pair.public, COST, os.urandom(_SALT), b"")
        sealed = AESGCM(empty._key(passphrase)).encrypt(_IV, pair.secret, empty._start)
        return cls(pair.public, empty.cost, empty.salt, sealed)

    @classmethod
    def parse(cls, word: str) -> "LockedKey":
        """Return the key whose text is `word`. Raises `BadLockedKey`, before memory is taken for it."""
        signs = word.removeprefix(PREFIX)
        if len(signs) < _SIGNS:
            raise BadLockedKey(f"is cut off: it has {len(signs)} characters after {PREFIX}, expected {_SIGNS}")
        raw = decoded(signs, _SIZE)
        if raw is None:
            raise BadLockedKey(f"is no key: what follows {PREFIX} is not base64url of {_SIZE} bytes")
        *cost, salt, public = _START.unpack_from(raw)
        log_n, block, lanes = cost
        if log_n < _LEAST_COST or not 1 <= lanes <= _MOST_LANES or not block:
            raise BadLockedKey(f"has parameters of scrypt that are none: n = 2^{log_n}, r = {block}, p = {lanes}")
        if (memory := 128 * block << log_n) > MOST_MEMORY:
            raise BadLockedKey(
                f"asks for {memory >> 20} MiB of memory (n = 2^{log_n}, r = {block}), of which it gets "
                f"{MOST_MEMORY >> 20} at most"
            )
        return cls(PublicKey(public), (log_n, block, lanes), salt, raw[_START.size :])

    @property
    def text(self) -> str:
        """The word for a key file, with its prefix."""
        return PREFIX + encoded(self._start + self.sealed)

    def open(self, passphrase: bytes) -> KeyPair:
        """Return the pair. Raises `WrongPassphrase`, also if the text was changed."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            pair = KeyPair.of_secret(AESGCM(self._key(passphrase)).decrypt(_IV, self.sealed, self._start))
        except InvalidTag as error:
            raise WrongPassphrase from error
        if pair.public != self.public:
            raise WrongPassphrase
        return pair

    @property
    def _start(self) -> bytes:
        return _START.pack(*self.cost, self.salt, self.public.raw)

    def _key(self, passphrase: bytes) -> bytes:
        from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

        log_n, block, lanes = self.cost
        return Scrypt(self.salt, _KEY, 2**log_n, block, lanes).derive(passphrase)
