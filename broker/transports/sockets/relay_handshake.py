"""Handshake between a relay and a process that dials it, and what they tell each other after it.

    process -> relay    magic "SLR1" | E | tag of the secret of admission                         52 bytes
    relay -> process    a code: 0 | F | sealed with (ef, er): nothing                             49
    process -> relay    sealed with (ef, er): P | sealed with (ef, er, pf, secret): the request  113
    both, after that    notes, sealed with keys of the same: a code and a ticket                  33 each

E and F are keys of X25519 for this connection alone; r is the relay's key, p the process's own, and (ef) stands for
what the secret of e and the key F have in common. So strangers cost the relay one digest, the relay proves its key
before it learns who dials, and who is on the way reads no key. It is the pattern XKpsk of Noise, with tags by HMAC,
HKDF and AES-256-GCM (https://noiseprotocol.org/noise.html). Nothing may come in another order or length.
"""

import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b, sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from stageline.broker.errors import BadKey
from stageline.broker.keys.pairs import PUBLIC_BYTES, KeyPair, PublicKey

from .relay_address import ADMISSION_BYTES, RelayAddress

MAGIC = b"SLR1"
TICKET = 16  # random bytes that name a dialler who waits
TAG = 16
KEY_BYTES = 32  # of a cipher
NAME_BYTES = TICKET  # either stands in a request
_REQUEST = struct.Struct(f">B{PUBLIC_BYTES}s{NAME_BYTES}sQ")
_NOTE = struct.Struct(f">B{TICKET}s")
HELLO_BYTES = len(MAGIC) + PUBLIC_BYTES + TAG
ANSWER_BYTES = 1 + PUBLIC_BYTES + TAG
REQUEST_BYTES = PUBLIC_BYTES + TAG + _REQUEST.size + TAG
NOTE_BYTES = _NOTE.size + TAG

GRANTED, NOT_ADMITTED = b"\0", b"\1"  # with which an answer begins


class Unproven(Exception):
    """Error that the other end does not prove what it has to."""


class Wish(IntEnum):
    """Purpose of a connection to a relay."""

    LISTEN = 1  # to be told of those who dial this process
    DIAL = 2  # to be connected with the process that has a key
    TAKE = 3  # to be connected with the dialler who waits under a ticket


class NoteCode(IntEnum):
    """Meaning of a note."""

    READY = 1  # what follows is the peer's; for a listener: it is registered
    ABSENT = 2  # no process with this key is there, or it does not come
    TAKEN = 3  # another process has this key and name
    CROWDED = 4  # too many connections of this key
    OFFER = 5  # a dialler waits under the ticket
    PING = 6
    PONG = 7


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """Request of a process to a relay.

    Attributes:
        kind: Purpose of the connection.
        target: Raw key of the peer to dial.
        name: Digest of the name that the listener has beside its key; or the ticket to take.
        number: Count of the processes that had this key and name: of two listeners, the one with more stays.
    """

    kind: Wish
    target: bytes = bytes(PUBLIC_BYTES)
    name: bytes = bytes(NAME_BYTES)
    number: int = 0


class RelaySession:
    """Notes of both ends after the handshake. They are sealed with counters: none can be repeated, left out or made."""

    def __init__(self, root: bytes, transcript: bytes, *, relays: bool) -> None:
        """Derive the keys of both directions.

        Args:
            root: Secret of the handshake.
            transcript: Digest of all that was said before.
            relays: True at the relay.
        """
        keys = _derived(root, transcript, b"notes")
        outward, inward = keys[relays], keys[not relays]
        self._seal, self._open = AESGCM(outward), AESGCM(inward)
        self._sealed = self._opened = 0

    def seal(self, code: NoteCode, ticket: bytes = bytes(TICKET)) -> bytes:
        """Return the next note to send."""
        self._sealed += 1
        return self._seal.encrypt(_nonce(self._sealed), _NOTE.pack(code, ticket), None)

    def open(self, note: bytes) -> tuple[NoteCode, bytes]:
        """Return code and ticket of the next note that came. Raises `Unproven`."""
        self._opened += 1
        code, ticket = _NOTE.unpack(_unsealed(self._open, _nonce(self._opened), note, b""))
        try:
            return NoteCode(code), ticket
        except ValueError as error:
            raise Unproven(f"what came is no note: {error}") from error


class DiallersHandshake:
    """Handshake of a process that dials the relay at `address`."""

    def __init__(self, address: RelayAddress, pair: KeyPair) -> None:
        """Begin a handshake, of one connection, as the holder of `pair`."""
        self._address, self._pair = address, pair
        self._own = KeyPair.generate()
        self.hello = _hello(self._own.public.raw, address.key, address.secret)

    def request(self, answer: bytes, request: RelayRequest) -> tuple[bytes, RelaySession]:
        """Return the request to send after the relay's `answer`, and the session. Raises `Unproven`."""
        theirs = answer[1 : 1 + PUBLIC_BYTES]
        common = _common(self._own, theirs) + _common(self._own, self._address.key.raw)
        transcript = sha256(self.hello + theirs).digest()
        outward, inward = _derived(common, transcript, b"keys")
        _unsealed(AESGCM(inward), _nonce(0), answer[1 + PUBLIC_BYTES :], transcript)
        identity = AESGCM(outward).encrypt(_nonce(0), self._pair.public.raw, transcript)
        transcript = sha256(transcript + identity).digest()
        root = common + _common(self._pair, theirs) + self._address.secret
        sealed = AESGCM(_derived(root, transcript, b"request")[0]).encrypt(
            _nonce(0), _REQUEST.pack(request.kind, request.target, request.name, request.number), transcript
        )
        return identity + sealed, RelaySession(root, transcript, relays=False)


class RelaysHandshake:
    """Handshake of the relay, after a sound hello; `answer` is to be sent."""

    def __init__(self, pair: KeyPair, secret: bytes, hello: bytes) -> None:
        """Answer `hello`, which costs two agreements. Raises `Unproven` if its sender lacks the secret of admission.

        Args:
            pair: Pair of the relay.
            secret: Secret of admission.
            hello: First bytes of the connection.
        """
        theirs = hello[len(MAGIC) : len(MAGIC) + PUBLIC_BYTES]
        if not hmac.compare_digest(hello, _hello(theirs, pair.public, secret)):
            raise Unproven("what came is not the beginning of a connection of someone who has the secret of admission")
        self._own, self._secret = KeyPair.generate(), secret
        self._common = _common(self._own, theirs) + _common(pair, theirs)
        self._transcript = sha256(hello + self._own.public.raw).digest()
        self._inward, outward = _derived(self._common, self._transcript, b"keys")
        self.answer = GRANTED + self._own.public.raw + AESGCM(outward).encrypt(_nonce(0), b"", self._transcript)

    def read(self, request: bytes) -> tuple[PublicKey, RelayRequest, RelaySession]:
        """Return who has proven their key, what they ask for, and the session. Raises `Unproven`."""
        identity, sealed = request[: PUBLIC_BYTES + TAG], request[PUBLIC_BYTES + TAG :]
        raw = _unsealed(AESGCM(self._inward), _nonce(0), identity, self._transcript)
        transcript = sha256(self._transcript + identity).digest()
        root = self._common + _common(self._own, raw) + self._secret
        content = _unsealed(AESGCM(_derived(root, transcript, b"request")[0]), _nonce(0), sealed, transcript)
        try:
            kind, target, name, number = _REQUEST.unpack(content)
            who = PublicKey.received(raw)
            return who, RelayRequest(Wish(kind), target, name, number), RelaySession(root, transcript, relays=True)
        except (ValueError, BadKey) as error:
            raise Unproven(f"what came is no request: {error}") from error


def relay_pair(own: KeyPair) -> KeyPair:
    """Return the pair of the relay of who has the `own` pair, which is used for nothing else."""
    return KeyPair.of_secret(blake2b(own.secret, digest_size=KEY_BYTES, person=b"stageline relayk").digest())


def admission_secret(own: KeyPair, serial: int) -> bytes:
    """Return the secret of admission to the relay of who has the `own` pair: derived at each start, kept nowhere.

    Args:
        own: Pair of the user who starts the relay.
        serial: Number of the secret, from 0 on.
    """
    place = serial.to_bytes(8, "big")
    return blake2b(place, key=own.secret, digest_size=ADMISSION_BYTES, person=b"stageline relaya").digest()


def name_digest(name: str) -> bytes:
    """Return what a relay learns of a name."""
    return blake2b(name.encode(), digest_size=NAME_BYTES, person=b"stageline relay").digest()


def _hello(ephemeral: bytes, relay: PublicKey, secret: bytes) -> bytes:
    content = MAGIC + ephemeral
    return content + hmac.digest(secret, b"stageline relay hello" + content + relay.raw, "sha256")[:TAG]


def _common(own: KeyPair, theirs: bytes) -> bytes:
    """Return what the secret of `own` and the raw key `theirs` have in common. Raises `Unproven` if that is nothing."""
    try:
        return own.agreed(theirs)
    except ValueError as error:
        raise Unproven("the key of the other end is none") from error


def _derived(root: bytes, transcript: bytes, purpose: bytes) -> tuple[bytes, bytes]:
    """Return the keys of the dialler and of the relay."""
    keys = HKDF(SHA256(), 2 * KEY_BYTES, transcript, b"stageline relay " + purpose).derive(root)
    return keys[:KEY_BYTES], keys[KEY_BYTES:]


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def _unsealed(key: AESGCM, nonce: bytes, sealed: bytes, data: bytes) -> bytes:
    try:
        return key.decrypt(nonce, sealed, data)
    except InvalidTag as error:
        raise Unproven("the other end does not have the key that it should") from error
