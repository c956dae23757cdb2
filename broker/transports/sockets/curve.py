"""CURVE on ZeroMQ's sockets: both ends prove their keys, and what they send is encrypted (https://rfc.zeromq.org/spec/26/).

A server with `ZAP_DOMAIN` or `ZAP_ENFORCE_DOMAIN` alone, and no thread that answers, admits every key (libzmq 4.3.5):
`open_keyed` sets both, and begins to answer before there is a socket. ZeroMQ asks at each handshake if a key may
connect (ZAP, https://rfc.zeromq.org/spec/27/):

    peer ──handshake──> ZeroMQ's I/O thread ──inproc://zeromq.zap.01──> thread "zap" ──> Admission.admits
                                             <── 200 and User-Id, 400, 500: revoked, or 300: not ready

A context has one such thread. If it dies, each later handshake fails: its socket is closed with it, and sockets that
enforce a domain refuse every peer then. Without an answer a connection ends after `zmq.HANDSHAKE_IVL`.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from stageline.broker.keys.admission import Admission, NotReady, ServerKeys
from stageline.broker.keys.join_line import keyed
from stageline.broker.keys.pairs import PUBLIC_BYTES, KeyPair, PublicKey

from .bind import open_socket

# ZeroMQ sends nothing of a frame before all of it is encrypted, and decrypts nothing before all of it has come.
PIECE = 2**20  # bytes of a frame at most, so that both ends work while the network does
SURPLUS = 33  # bytes that CURVE adds to a frame: a command's name, a nonce, a tag, a flag
DOMAIN = b"stageline"
_ADDRESS = "inproc://zeromq.zap.01"
_ADMITTED, _LATER = b"200", b"300"  # after 300 a client dials again by itself
_REFUSED, _REVOKED = b"400", b"500"  # after these it does not


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


def begin_answering(context: "zmq.Context[Any]", admission: Admission) -> None:
    """Answer for the sockets of `context` by `admission` until the context is terminated. Call it once for a context.

    The thread has a shadow of the context, so that no other thread closes its socket.
    """
    socket: zmq.Socket[Any] = zmq.Context.shadow(context.underlying).socket(zmq.REP)
    socket.set(zmq.LINGER, 0)
    socket.bind(_ADDRESS)
    threading.Thread(target=_answer_all, args=(socket, admission), name="zap", daemon=True).start()


def _answer_all(socket: "zmq.Socket[Any]", admission: Admission) -> None:
    with socket:
        while True:
            try:
                socket.send_multipart(_answer(socket.recv_multipart(), admission))
            except zmq.ContextTerminated:
                return


def _answer(request: Sequence[bytes], admission: Admission) -> Sequence[bytes]:
    version, sequence, domain, _, _, mechanism, *credentials = request
    status, user = _REFUSED, b""
    if (domain, mechanism) == (DOMAIN, b"CURVE") and [*map(len, credentials)] == [PUBLIC_BYTES]:
        public = PublicKey(credentials[0])
        try:
            if admission.admits(public):
                status, user = _ADMITTED, public.text.encode()
            elif admission.has_revoked(public):
                status = _REVOKED
        except NotReady:
            status = _LATER
        except Exception:  # of an admission that reads what the broker keeps
            import structlog  # imports rich, for which commands that only ask would wait

            log = structlog.get_logger()
            log.exception("a bug in stageline: a key could not be judged")
            status = _LATER
    return [version, sequence, status, b"", user, b""]


def key_in(frame: zmq.Frame) -> str:
    """Return the text of the key over whose connection `frame` came."""
    return str(frame.get("User-Id"))
