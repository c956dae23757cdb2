"""Answers to ZeroMQ, which asks at each handshake if a key may connect (ZAP, https://rfc.zeromq.org/spec/27/).

    peer ──handshake──> ZeroMQ's I/O thread ──inproc://zeromq.zap.01──> thread "zap" ──> Admission.admits
                                             <── 200 and User-Id, 400, 500: revoked, or 300: not ready

A context has one such thread. If it dies, each later handshake fails: its socket is closed with it, and sockets that
enforce a domain refuse every peer then (libzmq 4.3.5). Without an answer a connection ends after `zmq.HANDSHAKE_IVL`.
"""

import threading
from collections.abc import Sequence
from typing import Any

import structlog
import zmq

from stageline.broker.keys.admission import Admission, NotReady
from stageline.broker.keys.pairs import PUBLIC_BYTES, PublicKey

DOMAIN = b"stageline"

_ADDRESS = "inproc://zeromq.zap.01"
_ADMITTED, _LATER = b"200", b"300"  # after 300 a client dials again by itself
_REFUSED, _REVOKED = b"400", b"500"  # after these it does not

log = structlog.get_logger()


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
            log.exception("a bug in stageline: a key could not be judged")
            status = _LATER
    return [version, sequence, status, b"", user, b""]


def key_in(frame: zmq.Frame) -> str:
    """Return the text of the key over whose connection `frame` came."""
    return str(frame.get("User-Id"))
