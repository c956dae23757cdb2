"""Boxes: control messages between a client's key and the broker's, over a channel that others read and write.

A client opens a session, and from then on both sides send sealed messages:

    client                               broker
    OPENING  nonce, e, key, proof        --->
                  <---  WELCOME  nonce, f, proof;  or REFUSED  nonce, proof
    MESSAGE  nonce, serial, sealed       <-->            or LOST  nonce: the broker does not know the session

The handshake has the pattern IK of the Noise protocol framework (revision 34, section 7.5): each side draws a pair for
the session, e and f, and what they agree on comes of e and f and both lasting keys (X25519, HKDF, AES-256-GCM). So a
client's key is hidden, and what has passed stays so when a lasting key becomes known later; and who knows a client's
key cannot speak as the broker to it. The name of the run is part of all that is derived.

A message has a key of its own, made of the session's root for its direction and of 24 random bytes, the salt. All other
bytes of the frame are associated data. So a frame opens once, between these keys, in this direction, in this session,
and as it was sent: serials only rise. Who repeats an opening gets the reply of before. Only keys that have proven
themselves are put before the admission.

    frame     magic "SLBX" | kind, u8 | nonce, 16 bytes | rest
    OPENING   e, 32 bytes | client's key, sealed | nothing, sealed
    WELCOME   f, 32 bytes | nothing, sealed                      REFUSED   nothing, sealed            LOST   nothing
    MESSAGE   serial, u64 | salt | the message, sealed

LOST alone is not proven; it makes a client open another session, and keep the old one until then. It answers also what
does not open in a session that has brought no message: an opening may have come again after its session was lost.
"""

import struct
from collections import OrderedDict
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag

from .admission import Admission, KeyRefusal, NotReady
from .box_handshake import NONCE, START, BoxHandshake, BoxSession, FrameKind, parts_of, start_of
from .pairs import SECRET_BYTES, KeyPair, PublicKey
from .single_use import SALT, TAG, RandomBytes, key_of, opened, sealed

MOST_SESSIONS = 4096  # that a broker keeps; of more, those that were silent longest are lost

_SERIAL = struct.Struct(">Q")

SURPLUS = START.size + _SERIAL.size + SALT + TAG  # bytes by which a frame is longer than its message


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
        self._pair = pair
        self._broker = broker
        self._name = name
        self._random = random
        self._session: BoxSession | None = None
        self._handshake: BoxHandshake | None = None  # that has no reply yet
        self.refusal = KeyRefusal.NONE  # of this key, by the broker, which has proven to be it
        self.unopened = 0  # frames
        self.begin()

    @property
    def is_open(self) -> bool:
        """True if there is a session, so that messages can be sealed."""
        return self._session is not None

    @property
    def opening(self) -> bytes:
        """The frame to send, again and again until a reply to it arrives; b"" while no session is to be opened."""
        return b"" if self._handshake is None else self._handshake.opening

    def begin(self) -> None:
        """Forget the session, and open another one."""
        self._session, self.refusal = None, KeyRefusal.NONE
        self._renew()

    def seal(self, message: bytes) -> bytes:
        """Return the frame of a message to the broker. Raises `ValueError` unless `is_open`."""
        if self._session is None:
            raise ValueError("there is no session with the broker")
        return _sealed_message(self._session, self._session.to_broker, self._random, message)

    def open(self, frame: bytes) -> bytes | None:
        """Return the message from the broker in `frame`; None if it has none, or is not opened, which is counted."""
        kind, nonce, rest = parts_of(frame)
        session, handshake = self._session, self._handshake
        match kind:
            case FrameKind.MESSAGE if session is not None and nonce == session.nonce:
                if (message := _opened_message(session, session.to_client, frame)) is not None:
                    return message
            case FrameKind.LOST if session is not None and nonce == session.nonce and not rest:
                if handshake is None:
                    self._renew()
                return None
            case FrameKind.WELCOME if handshake is not None and nonce == handshake.nonce:
                if (welcomed := handshake.welcomed(frame)) is not None:
                    self._session, self._handshake, self.refusal = welcomed, None, KeyRefusal.NONE
                    return None
            case FrameKind.REFUSED if handshake is not None and (refusal := _refusal_in(frame, handshake)):
                self._session, self._handshake, self.refusal = None, None, refusal
                return None
        self.unopened += 1
        return None

    def _renew(self) -> None:
        nonce, drawn = self._random(NONCE), KeyPair.of_secret(self._random(SECRET_BYTES))
        self._handshake = BoxHandshake.begun(self._pair, self._broker, self._name, nonce, drawn)


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
    session: BoxSession
    address: bytes
    opening: bytes
    welcome: bytes

    def heard_at(self, address: bytes) -> None:
        """Note the address of its newest message."""
        self.address = address


class BrokerBox:
    """Broker's side of the boxes of all clients."""

    def __init__(self, pair: KeyPair, admission: Admission, name: str, random: RandomBytes) -> None:
        """Begin without sessions.

        Args:
            pair: Pair of the broker.
            admission: Judge of the clients' keys, asked for each opening that proves one, in the caller's thread.
            name: Name of the run, or of the broker, at both ends the same.
            random: Source of tokens and salts.
        """
        self._pair = pair
        self._admission = admission
        self._name = name
        self._random = random
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()  # by nonce; who was silent longest is the first

    def open(self, address: bytes, frame: bytes) -> Unboxed | None:
        """Return the content of a frame; None for one that is not opened.

        Args:
            address: Where the frame says that it comes from.
            frame: Bytes received.
        """
        kind, nonce, _ = parts_of(frame)
        match kind:
            case FrameKind.MESSAGE if len(frame) >= SURPLUS:
                return self._message(nonce, address, frame)
            case FrameKind.OPENING:
                return self._reply(nonce, address, frame)
        return None

    def seal(self, sender: bytes, message: bytes) -> tuple[bytes, bytes] | None:
        """Return the address of a client and the frame of a message to it; None if it has no session any more."""
        if (client := self._clients.get(sender)) is None:
            return None
        return client.address, _sealed_message(client.session, client.session.to_client, self._random, message)

    def key_of(self, sender: bytes) -> str:
        """Return the text of the key of a session; "" if it is lost."""
        return self._clients[sender].public.text if sender in self._clients else ""

    def address_of(self, sender: bytes) -> bytes | None:
        """Return the address at which the client of a session was heard last; None if the session is lost."""
        return self._clients[sender].address if sender in self._clients else None

    def forget(self) -> None:
        """Lose all sessions: clients open others, and are judged again."""
        self._clients.clear()

    def _message(self, nonce: bytes, address: bytes, frame: bytes) -> Unboxed | None:
        lost = Unboxed(answer=start_of(FrameKind.LOST, nonce))
        if (client := self._clients.get(nonce)) is None:
            return lost
        message = _opened_message(client.session, client.session.to_broker, frame)
        if message is None:
            return None if client.session.heard else lost  # a repeated opening made it: the client's has other keys
        client.heard_at(address)
        self._clients.move_to_end(nonce)
        return Unboxed(nonce, message)

    def _reply(self, nonce: bytes, address: bytes, frame: bytes) -> Unboxed | None:
        """Return the reply to an opening, whose client is judged only once it has proven its key."""
        handshake = BoxHandshake.received(self._pair, self._name, frame)
        if handshake is None:
            return None
        try:
            is_admitted = self._admission.admits(handshake.client)
        except NotReady:
            return Unboxed()  # the client repeats its opening
        if not is_admitted:
            is_revoked = self._admission.has_revoked(handshake.client)
            return Unboxed(answer=handshake.refused(KeyRefusal.REVOKED if is_revoked else KeyRefusal.NOT_ADMITTED))
        client = self._clients.get(nonce)
        if client is None:
            session, welcome = handshake.answered(KeyPair.of_secret(self._random(SECRET_BYTES)))
            client = self._clients[nonce] = _Client(handshake.client, session, address, frame, welcome)
            if len(self._clients) > MOST_SESSIONS:
                self._clients.popitem(last=False)
        return Unboxed(answer=client.welcome) if client.opening == frame else None


def _refusal_in(frame: bytes, handshake: BoxHandshake) -> KeyRefusal:
    """Return what a broker's frame refuses the client's key for; `NONE` if the broker has not made it."""
    possible = KeyRefusal.NOT_ADMITTED, KeyRefusal.REVOKED
    return next((each for each in possible if frame == handshake.refused(each)), KeyRefusal.NONE)


def _sealed_message(session: BoxSession, root: bytes, random: RandomBytes, message: bytes) -> bytes:
    salt = random(SALT)
    start = start_of(FrameKind.MESSAGE, session.nonce) + _SERIAL.pack(session.next_serial()) + salt
    return start + sealed(key_of(root, salt), start, message)


def _opened_message(session: BoxSession, root: bytes, frame: bytes) -> bytes | None:
    """Return the message in a frame of a session; None if it has come before, or this root did not seal it."""
    if len(frame) < SURPLUS:
        return None
    serial = _SERIAL.unpack_from(frame, START.size)[0]
    if serial <= session.heard:
        return None
    end = SURPLUS - TAG
    try:
        message = opened(key_of(root, frame[end - SALT : end]), frame[:end], frame[end:])
    except InvalidTag:
        return None
    session.hears(serial)
    return message
