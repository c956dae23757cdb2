"""CURVE on ZeroMQ's sockets: both ends prove their keys, and what they send is encrypted (https://rfc.zeromq.org/spec/26/).

A server with `ZAP_DOMAIN` or `ZAP_ENFORCE_DOMAIN` alone, and no thread that answers, admits every key (libzmq 4.3.5):
`open_keyed` sets both, and begins to answer before there is a socket.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from stageline.broker.keys.admission import Admission, ServerKeys
from stageline.broker.keys.join_line import keyed
from stageline.broker.keys.pairs import KeyPair, PublicKey

from .bind import open_socket
from .zap import DOMAIN, begin_answering

# ZeroMQ sends nothing of a frame before all of it is encrypted, and decrypts nothing before all of it has come.
PIECE = 2**20  # bytes of a frame at most, so that both ends work while the network does
SURPLUS = 33  # bytes that CURVE adds to a frame: a command's name, a nonce, a tag, a flag


@dataclass(frozen=True, slots=True)
class CurveServer:
    """Keys of a socket that listens.

    Attributes:
        pair: Pair by which peers know this process.
        admits: Judge of the peers' keys.
    """

    pair: KeyPair
    admits: Admission

    @property
    def options(self) -> Mapping[int, int | bytes]:
        """Options of the socket."""
        return {
            zmq.CURVE_SERVER: 1,
            zmq.CURVE_SECRETKEY: self.pair.secret,
            zmq.ZAP_DOMAIN: DOMAIN,
            zmq.ZAP_ENFORCE_DOMAIN: 1,
        }

    def prepare(self, context: "zmq.Context[Any]") -> None:
        """Begin to answer who is admitted to the sockets of `context`."""
        begin_answering(context, self.admits)


@dataclass(frozen=True, slots=True)
class CurveClient:
    """Keys of a socket that dials.

    Attributes:
        pair: Pair by which the server knows this process.
        server: Key of the server; another one is refused before it learns who dials.
    """

    pair: KeyPair
    server: PublicKey

    @property
    def options(self) -> Mapping[int, int | bytes]:
        """Options of the socket."""
        return {
            zmq.CURVE_SERVERKEY: self.server.raw,
            zmq.CURVE_PUBLICKEY: self.pair.public.raw,
            zmq.CURVE_SECRETKEY: self.pair.secret,
        }

    def prepare(self, context: "zmq.Context[Any]") -> None:
        """Do nothing: only servers judge keys."""


class Succession:
    """Admission by a judge that gives way to the next."""

    def __init__(self, judge: Admission) -> None:
        """Begin with `judge`."""
        self._judge = judge

    def admits(self, public: PublicKey) -> bool:
        """Return True if the present judge admits the key. Safe to call from any thread."""
        return self._judge.admits(public)

    def has_revoked(self, public: PublicKey) -> bool:
        """Return True if the present judge knows the key as revoked. Safe to call from any thread."""
        return self._judge.has_revoked(public)

    def renew(self, judge: Admission) -> None:
        """Admit by `judge` from now on."""
        self._judge = judge


Curve = CurveServer | CurveClient | None


def open_keyed(context: "zmq.Context[Any]", kind: int, options: Mapping[int, int], curve: Curve) -> "zmq.Socket[Any]":
    """Return a socket as `open_socket` does, with the keys of `curve`; without any if that is None.

    Args:
        context: Context of the socket; one that has a server's keys has no other server.
        kind: Type of the socket, such as `zmq.ROUTER`.
        options: Values by option, among them `zmq.MAXMSGSIZE`, which ZeroMQ compares with encrypted frames.
        curve: Keys.
    """
    if curve is None:
        return open_socket(context, kind, options)
    curve.prepare(context)
    largest = options[zmq.MAXMSGSIZE] + SURPLUS
    return open_socket(context, kind, {**options, zmq.MAXMSGSIZE: largest, **curve.options})


def in_pieces(frames: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
    """Return the frames of a message, those of tensors in pieces of `PIECE` bytes, so that an encrypted one is fast."""
    if max(map(len, frames)) <= PIECE:
        return frames
    tensors = [memoryview(each) for each in frames[1:]]
    return [frames[0], *(each[at : at + PIECE] for each in tensors for at in range(0, len(each) or 1, PIECE))]


def surplus(curve: Curve) -> int:
    """Return how many bytes longer a frame is on its way than it was given to a socket with the keys of `curve`."""
    return 0 if curve is None else SURPLUS


def server_of(keys: ServerKeys | None) -> CurveServer | None:
    """Return the keys of a socket that listens; None without any."""
    return None if keys is None else CurveServer(keys.pair, keys.admission)


def client_of(pair: KeyPair | None, server: PublicKey | None) -> CurveClient | None:
    """Return the keys of a socket that dials; None without any. There are both keys, or neither: see `key_expected`."""
    return None if pair is None or server is None else CurveClient(pair, server)


def endpoint_of(address: str, curve: CurveServer | None) -> str:
    """Return the address of a socket that listens, as others dial it: with its key, if it has one."""
    return address if curve is None else keyed(address, curve.pair.public)
