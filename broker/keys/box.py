"""Boxes: control messages between a client's key and the broker's, over a channel that others read and write.

A client opens a session, and from then on both sides send sealed messages:

    client                               broker
    OPENING  client's key, nonce, sealed  --->
                  <---  WELCOME  nonce, sealed: token;  or REFUSED  nonce, sealed
    MESSAGE  nonce, serial, sealed        <-->           or LOST  nonce: the broker does not know the session

Both ends agree on roots (X25519 of their keys, HKDF, RFC 5869) for the direction, both public keys and the name of the
run. Each frame has 24 random bytes, the salt, from which its own key is derived (HKDF-Expand, AES-256-GCM). Associated
data are all other bytes of the frame, and the session's token, which the broker draws and nobody else can read. So a
frame opens once, between these keys, in this direction, in this session, under this name, and as it was sent: serials
only rise. The client draws a new nonce for each opening, so that no earlier reply is one to it; who repeats an opening
gets a reply that is of use to its client alone. Only keys that have proven themselves are put before the admission.

    frame     magic "SLBX" | kind, u8 | nonce, 16 bytes | rest
    OPENING   public key, 32 bytes | salt | nothing, sealed
    WELCOME   salt | token, sealed            REFUSED   salt | nothing, sealed            LOST   nothing
    MESSAGE   serial, u64 | salt | the message, sealed

LOST alone is not proven; it makes a client open another session, and keep the old one until then.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import TypeAlias

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from stageline.broker.errors import BadKey

from .admission import Admission, NotReady
from .pairs import PUBLIC_BYTES, KeyPair, PublicKey

NONCE = TOKEN = 16  # bytes
SALT = 24  # random bytes of a frame
TAG = 16  # bytes by which what is sealed is longer
MOST_SESSIONS = 4096  # that a broker keeps; of more, those that were silent longest are lost

BOX_MAGIC = b"SLBX"
_START = struct.Struct(f">4sB{NONCE}s")
_SERIAL = struct.Struct(">Q")
_IV = bytes(12)  # each key seals one frame

SURPLUS = _START.size + _SERIAL.size + SALT + TAG  # bytes by which a frame is longer than its message

RandomBytes: TypeAlias = Callable[[int], bytes]
"""Function that returns as many random bytes as it is asked for, `os.urandom`."""


class _Kind(IntEnum):
    OPENING = 1
    WELCOME = 2
    REFUSED = 3
    LOST = 4
    MESSAGE = 5


@dataclass(frozen=True, slots=True)
class _Roots:
    """Keys of a client and a broker, from which those of their frames are derived."""

    to_broker: bytes = field(repr=False)
    to_client: bytes = field(repr=False)


@dataclass(slots=True)
class _Session:
    """One side's knowledge of a session. Serials are those of the last message each way."""

    nonce: bytes
    token: bytes = field(repr=False)
    said: int = 0
    heard: int = 0


class ClientBox:
    """Client's side of a box."""

    def __init__(self, pair: KeyPair, broker: PublicKey, name: str, random: RandomBytes) -> None:
        """Begin without a session.

        Args:
            pair: Pair of the client.
            broker: Key of the broker.
            name: Name of the run, or of the broker, at both ends the same.
            random: Source of nonces and salts.
        """
        self._public = pair.public.raw
        self._roots = _agreed(pair, broker, pair.public, broker, name)
        self._random = random
        self._session: _Session | None = None
        self._nonce = b""  # of the opening that has no reply yet
        self._opening = b""
        self.is_refused = False  # the broker has proven that it does not admit this key
        self.unopened = 0  # frames
        self.begin()

    @property
    def is_open(self) -> bool:
        """True if there is a session, so that messages can be sealed."""
        return self._session is not None

    @property
    def opening(self) -> bytes:
        """The frame to send, again and again until a reply to it arrives; b"" while no session is to be opened."""
        return self._opening

    def begin(self) -> None:
        """Forget the session, and open another one."""
        self._session, self.is_refused = None, False
        self._renew()

    def seal(self, message: bytes) -> bytes:
        """Return the frame of a message to the broker. Raises `ValueError` unless `is_open`."""
        if self._session is None:
            raise ValueError("there is no session with the broker")
        return _sealed_message(self._session, self._roots.to_broker, self._random, message)

    def open(self, frame: bytes) -> bytes | None:
        """Return the message from the broker in `frame`; None if it has none, or is not opened, which is counted."""
        kind, nonce, rest = _parts(frame)
        session = self._session
        match kind:
            case _Kind.MESSAGE if session is not None and nonce == session.nonce:
                if (message := _opened_message(session, self._roots.to_client, frame)) is not None:
                    return message
            case _Kind.LOST if session is not None and nonce == session.nonce and not rest:
                if not self._opening:
                    self._renew()
                return None
            case _Kind.WELCOME | _Kind.REFUSED if nonce == self._nonce and self._opening:
                if (content := _opened(self._roots.to_client, frame, _START.size)) is not None:
                    self._reply(kind, content)
                    return None
        self.unopened += 1
        return None

    def _renew(self) -> None:
        self._nonce = self._random(NONCE)
        start = _start(_Kind.OPENING, self._nonce) + self._public
        self._opening = _sealed(self._roots.to_broker, start, self._random(SALT))

    def _reply(self, kind: int, content: bytes) -> None:
        """Take the reply to the opening."""
        self._opening = b""
        self.is_refused = kind == _Kind.REFUSED
        self._session = None if self.is_refused else _Session(self._nonce, content)


@dataclass(frozen=True, slots=True)
class Unboxed:
    """Content of a frame that a broker has received.

    Attributes:
        sender: Nonce of the session, by which the client is answered; b"" if the frame brought no message.
        message: The message.
        answer: Frame to send back to where the frame came from; b"" for none.
    """

    sender: bytes = b""
    message: bytes = field(default=b"", repr=False)
    answer: bytes = field(default=b"", repr=False)


@dataclass(slots=True)
class _Client:
    """Session of a broker with a client, with the address at which it was heard last."""

    public: PublicKey
    roots: _Roots
    session: _Session
    address: bytes


class BrokerBox:
    """Broker's side of the boxes of all clients."""

    def __init__(self, pair: KeyPair, admission: Admission, name: str, random: RandomBytes) -> None:
        """Begin without sessions.

        Args:
            pair: Pair of the broker.
            admission: Judge of the clients' keys, asked once for each session, in the caller's thread.
            name: Name of the run, or of the broker, at both ends the same.
            random: Source of tokens and salts.
        """
        self._admission = admission
        self._random = random
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()  # by nonce; who was silent longest is the first
        self._roots_of = lru_cache(MOST_SESSIONS)(lambda public: _agreed(pair, public, public, pair.public, name))

    def open(self, address: bytes, frame: bytes) -> Unboxed | None:
        """Return the content of a frame; None for one that is not opened.

        Args:
            address: Where the frame says that it comes from.
            frame: Bytes received.
        """
        kind, nonce, _ = _parts(frame)
        match kind:
            case _Kind.MESSAGE if nonce in self._clients:
                return self._message(self._clients[nonce], address, frame)
            case _Kind.MESSAGE if len(frame) >= SURPLUS:
                return Unboxed(answer=_start(_Kind.LOST, nonce))
            case _Kind.OPENING:
                return self._reply(nonce, address, frame)
        return None

    def seal(self, sender: bytes, message: bytes) -> tuple[bytes, bytes] | None:
        """Return the address of a client and the frame of a message to it; None if it has no session any more."""
        if (client := self._clients.get(sender)) is None:
            return None
        return client.address, _sealed_message(client.session, client.roots.to_client, self._random, message)

    def key_of(self, sender: bytes) -> str:
        """Return the text of the key of a session; "" if it is lost."""
        return self._clients[sender].public.text if sender in self._clients else ""

    def address_of(self, sender: bytes) -> bytes | None:
        """Return the address at which the client of a session was heard last; None if the session is lost."""
        return self._clients[sender].address if sender in self._clients else None

    def forget(self) -> None:
        """Lose all sessions: clients open others, and are judged again."""
        self._clients.clear()

    def _message(self, client: _Client, address: bytes, frame: bytes) -> Unboxed | None:
        message = _opened_message(client.session, client.roots.to_broker, frame)
        if message is None:
            return None
        client.address = address
        self._clients.move_to_end(client.session.nonce)
        return Unboxed(client.session.nonce, message)

    def _reply(self, nonce: bytes, address: bytes, frame: bytes) -> Unboxed | None:
        """Return the reply to an opening, whose client is judged only once it has proven its key."""
        public = _opener(frame)
        if public is None:
            return None
        roots = self._roots_of(public)
        if _opened(roots.to_broker, frame, _START.size + PUBLIC_BYTES) is None:
            return None
        try:
            is_admitted = self._admission.admits(public)
        except NotReady:
            return Unboxed()  # the client repeats its opening
        if not is_admitted:
            return Unboxed(answer=_sealed(roots.to_client, _start(_Kind.REFUSED, nonce), self._random(SALT)))
        client = self._clients.get(nonce)
        if client is None:
            client = self._clients[nonce] = _Client(public, roots, _Session(nonce, self._random(TOKEN)), address)
            if len(self._clients) > MOST_SESSIONS:
                self._clients.popitem(last=False)
        if client.public != public:
            return None
        start, salt = _start(_Kind.WELCOME, nonce), self._random(SALT)
        return Unboxed(answer=_sealed(roots.to_client, start, salt, client.session.token))


def _agreed(pair: KeyPair, peer: PublicKey, client: PublicKey, broker: PublicKey, name: str) -> _Roots:
    """Return the roots that the owners of both keys can make. Raises `ValueError` for a peer's key that is none."""
    shared = X25519PrivateKey.from_private_bytes(pair.secret).exchange(X25519PublicKey.from_public_bytes(peer.raw))

    def root(direction: str) -> bytes:
        context = msgspec.msgpack.encode(("stageline box", 1, direction, client.raw, broker.raw, name))
        return HKDF(SHA256(), 32, None, context).derive(shared)

    return _Roots(root("to broker"), root("to client"))


def _opener(frame: bytes) -> PublicKey | None:
    """Return the key in an opening; None if it has another length, or a key that no secret leads to."""
    if len(frame) != _START.size + PUBLIC_BYTES + SALT + TAG:
        return None
    try:
        return PublicKey.parse(PublicKey(frame[_START.size : _START.size + PUBLIC_BYTES]).text)
    except BadKey:
        return None


def _start(kind: _Kind, nonce: bytes) -> bytes:
    return _START.pack(BOX_MAGIC, kind, nonce)


def _parts(frame: bytes) -> tuple[int, bytes, bytes]:
    """Return the kind, the nonce and the rest of a frame; kind 0 for what is none."""
    if len(frame) < _START.size or not frame.startswith(BOX_MAGIC):
        return 0, b"", b""
    _, kind, nonce = _START.unpack_from(frame)
    return kind, nonce, frame[_START.size :]


def _cipher(root: bytes, salt: bytes) -> AESGCM:
    return AESGCM(HKDFExpand(SHA256(), 32, salt).derive(root))


def _sealed(root: bytes, start: bytes, salt: bytes, content: bytes = b"", token: bytes = b"") -> bytes:
    """Return a frame: the start, the salt, and the content, sealed."""
    return start + salt + _cipher(root, salt).encrypt(_IV, content, start + token)


def _opened(root: bytes, frame: bytes, start: int, token: bytes = b"") -> bytes | None:
    """Return the content of a frame whose salt begins at the byte `start`; None if this root did not seal it."""
    salt = frame[start : start + SALT]
    if len(frame) < start + SALT + TAG:
        return None
    try:
        return _cipher(root, salt).decrypt(_IV, frame[start + SALT :], frame[:start] + token)
    except InvalidTag:
        return None


def _sealed_message(session: _Session, root: bytes, random: RandomBytes, message: bytes) -> bytes:
    session.said += 1
    start = _start(_Kind.MESSAGE, session.nonce) + _SERIAL.pack(session.said)
    return _sealed(root, start, random(SALT), message, session.token)


def _opened_message(session: _Session, root: bytes, frame: bytes) -> bytes | None:
    """Return the message in a frame of a session; None if it has come before, or this root did not seal it."""
    if len(frame) < SURPLUS:
        return None
    serial = _SERIAL.unpack_from(frame, _START.size)[0]
    if serial <= session.heard:
        return None
    message = _opened(root, frame, _START.size + _SERIAL.size, session.token)
    if message is not None:
        session.heard = serial
    return message
