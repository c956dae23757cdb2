"""Handshake of a session between a client's key and a broker's, of the pattern IK of the Noise protocol framework.

    OPENING   e, 32 bytes | client's key, sealed | nothing, sealed
    WELCOME   f, 32 bytes | nothing, sealed                      REFUSED   nothing, sealed

e and f are drawn for the session. What is sealed has a key of its own: made of all that both have agreed on by then,
of what it is for, and of all that was said (Noise, revision 34, section 7.5). `box.py` has the frames.
"""

import struct
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec
from cryptography.exceptions import InvalidTag

from stageline.broker.errors import BadKey

from .admission import KeyRefusal
from .pairs import PUBLIC_BYTES, KeyPair, PublicKey
from .single_use import TAG, opened, root_of, sealed

NONCE = 16  # bytes
BOX_MAGIC = b"SLBX"
START = struct.Struct(f">4sB{NONCE}s")


class FrameKind(IntEnum):
    """Kind of a frame, its fifth byte."""

    OPENING = 1
    WELCOME = 2
    REFUSED = 3
    LOST = 4
    MESSAGE = 5


@dataclass(slots=True)
class BoxSession:
    """Knowledge that one side has of a session. Serials are those of the last message each way."""

    nonce: bytes
    to_broker: bytes = field(repr=False)
    to_client: bytes = field(repr=False)
    said: int = 0
    heard: int = 0

    def next_serial(self) -> int:
        """Return the serial of the next message of this side."""
        self.said += 1
        return self.said

    def hears(self, serial: int) -> None:
        """Note the serial of a message that the other side has sealed."""
        self.heard = serial


@dataclass(frozen=True, slots=True)
class BoxHandshake:
    """Opening of a session, at either side.

    Attributes:
        pair: Lasting pair of this side.
        drawn: Client's pair for the session; at the broker its public key alone, with the secret b"".
        nonce: Nonce of the session.
        client: Client's lasting key.
        broker: Broker's lasting key.
        name: Name of the run.
        shared: What both have agreed on: of e and the broker's key, and of both lasting keys.
        opening: Frame of the opening.
    """

    pair: KeyPair = field(repr=False)
    drawn: KeyPair = field(repr=False)
    nonce: bytes
    client: PublicKey
    broker: PublicKey
    name: str
    shared: bytes = field(repr=False)
    opening: bytes

    @classmethod
    def begun(cls, pair: KeyPair, broker: PublicKey, name: str, nonce: bytes, drawn: KeyPair) -> "BoxHandshake":
        """Return a client's handshake, of its pair, and of one that is drawn for this session."""
        e, start = drawn.public.raw, start_of(FrameKind.OPENING, nonce)
        es, ss = drawn.agreed(broker.raw), pair.agreed(broker.raw)
        hidden = sealed(_derived(es, "key", name, e, broker.raw), start + e, pair.public.raw)
        proof = sealed(_derived(es + ss, "opening", name, e, broker.raw), start + e + hidden)
        return cls(pair, drawn, nonce, pair.public, broker, name, es + ss, start + e + hidden + proof)

    @classmethod
    def received(cls, pair: KeyPair, name: str, frame: bytes) -> "BoxHandshake | None":
        """Return the handshake of a frame at the broker; None if its client has not proven a key."""
        if len(frame) != START.size + 2 * PUBLIC_BYTES + 2 * TAG:
            return None
        start, e = frame[: START.size], frame[START.size : START.size + PUBLIC_BYTES]
        hidden, proof = frame[START.size + PUBLIC_BYTES : -TAG], frame[-TAG:]
        broker = pair.public
        try:
            es = pair.agreed(e)
            raw = opened(_derived(es, "key", name, e, broker.raw), start + e, hidden)
            client = PublicKey.received(raw)
            shared = es + pair.agreed(raw)
            opened(_derived(shared, "opening", name, e, broker.raw), frame[:-TAG], proof)
        except (InvalidTag, BadKey, ValueError):  # ValueError: a point whose multiples are known to all
            return None
        drawn = KeyPair(PublicKey(e), b"")
        return cls(pair, drawn, parts_of(frame)[1], client, broker, name, shared, frame)

    def refused(self, refusal: KeyRefusal) -> bytes:
        """Return the frame that only the broker can make, and the client: the key is not admitted, or was revoked."""
        start = start_of(FrameKind.REFUSED, self.nonce)
        return start + sealed(self._key(refusal), start)

    def answered(self, drawn: KeyPair) -> tuple[BoxSession, bytes]:
        """Return the broker's session, with the pair that it has `drawn`, and the frame of the welcome."""
        e, f = self.drawn.public.raw, drawn.public.raw
        ee, se = drawn.agreed(e), drawn.agreed(self.client.raw)
        start = start_of(FrameKind.WELCOME, self.nonce) + f
        return self._session(ee + se, f), start + sealed(self._key("welcome", ee + se, f), start)

    def welcomed(self, frame: bytes) -> BoxSession | None:
        """Return the client's session, of the frame of a welcome; None if that is not the broker's."""
        f = frame[START.size : -TAG]
        if len(f) != PUBLIC_BYTES:
            return None
        try:
            later = self.drawn.agreed(f) + self.pair.agreed(f)
            opened(self._key("welcome", later, f), frame[:-TAG], frame[-TAG:])
        except (InvalidTag, ValueError):
            return None
        return self._session(later, f)

    def _session(self, later: bytes, f: bytes) -> BoxSession:
        return BoxSession(self.nonce, self._key("to broker", later, f), self._key("to client", later, f))

    def _key(self, purpose: str, later: bytes = b"", f: bytes = b"") -> bytes:
        """Return the key for a purpose, of all that both have agreed on, and of all that was said."""
        said = self.nonce, self.drawn.public.raw, f, self.client.raw, self.broker.raw
        return _derived(self.shared + later, purpose, self.name, *said)


def _derived(shared: bytes, purpose: str, name: str, *said: bytes) -> bytes:
    return root_of(shared, msgspec.msgpack.encode(("stageline box", 1, purpose, name, *said)))


def start_of(kind: FrameKind, nonce: bytes) -> bytes:
    """Return what a frame of a session begins with."""
    return START.pack(BOX_MAGIC, kind, nonce)


def parts_of(frame: bytes) -> tuple[int, bytes, bytes]:
    """Return the kind, the nonce and the rest of a frame; kind 0 for what is none."""
    if len(frame) < START.size or not frame.startswith(BOX_MAGIC):
        return 0, b"", b""
    _, kind, nonce = START.unpack_from(frame)
    return kind, nonce, frame[START.size :]
