"""Requests that the two ends of a queue send to each other beside its messages, and the times to send them.

    consumer -> producer   CreditRequest    what has arrived, and what may be sent
    producer -> consumer   RetentionReply   to a request that asks: what has been sent, what can be had

A frame: seal, 16 bytes | version, u8 | msgpack array. The seal is BLAKE2b of the rest, keyed with the key of the queue,
which the broker gives to its two places alone: no stranger, and no other worker, can move a consumer's credit, or its
connection. Of two requests of one consumer the one with the higher serial holds, so a request that is sent again
changes nothing.
"""

import hashlib
import hmac
from typing import TypeVar

import msgspec

from stageline.broker.codec.tensors import Count
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.pipeline.program import QueueName

from .delivery import Credit, Receiver, Retention, Sender, check_current
from .secrets import NO_KEYS, Keys

VERSION = 3
SEAL_BYTES = 16

FIRST_PAUSE = 0.5  # seconds without an arrival after which a consumer repeats its request
LONGEST_PAUSE = 5.0  # seconds; the pause between two requests doubles up to this


class _Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    run: str
    queue: QueueName
    incarnation: Count  # of the consumer; in a reply the newest that the producer has a request from
    serial: Count  # counts the requests of one consumer from 1; in a reply, that of the request

    @property
    def stamp(self) -> tuple[int, int]:
        """Rank of a request: of two for one queue, the higher one holds."""
        return self.incarnation, self.serial


class CreditRequest(_Request, frozen=True):
    """Request of a consumer: all messages before `next` have arrived, and the producer may send those before `credit`.

    `resend`: what was sent from `next` on is lost, send it again. `ask`: answer with a `RetentionReply`.
    """

    next: Count
    credit: Count
    resend: bool
    ask: bool

    def to_credit(self) -> Credit:
        """Return the credit that this request gives to a `Sender`."""
        return Credit(self.incarnation, self.serial, self.next, self.credit, self.next if self.resend else None)


class RetentionReply(_Request, frozen=True):
    """Reply of a producer to a `CreditRequest` that asks.

    Messages before `first` are forgotten; those before `sent` were sent before this reply, over the same connection.
    """

    first: Count
    sent: Count


_encode = msgspec.msgpack.Encoder().encode
_VERSION = bytes([VERSION])
_AnyRequest = TypeVar("_AnyRequest", CreditRequest, RetentionReply)


def pack(request: CreditRequest | RetentionReply, keys: Keys = NO_KEYS) -> bytes:
    """Return the frame of `request`, sealed with the key of its queue; without `keys`, the seal is a mere checksum.

    Raises `KeyError` if its queue is not among those of `keys`.
    """
    body = _VERSION + _encode(request)
    return _seal(body, keys[request.queue] if keys else b"") + body


def unpack(frame: bytes, kind: type[_AnyRequest], keys: Keys = NO_KEYS) -> _AnyRequest:
    """Return the request or reply in `frame`, which an end of its queue has sent.

    Args:
        frame: Frame as `pack` wrote it.
        kind: Class to decode to.
        keys: Keys of queues, by name.

    Raises:
        BadMessage: The frame is damaged or forged.
        ForeignMessage: The frame has another version, and no key.
    """
    body, seal = frame[SEAL_BYTES:], frame[:SEAL_BYTES]
    request = _decode(body, kind) if body and body[0] == VERSION else None
    key = b"" if not keys else None if request is None else keys.get(request.queue)
    if not body or key is None or not hmac.compare_digest(_seal(body, key), seal):
        raise BadMessage("a request between queue ends is damaged, or from a process outside the run")
    return _decode(body, kind) if request is None else request


def run_named_in(frame: bytes) -> str:
    """Return the run that a `CreditRequest` names which cannot be unpacked.

    A key of another run may have sealed it: none of its fields is proven. Raises `BadMessage` if it names no run.
    """
    return _decode(frame[SEAL_BYTES:] or b"-", CreditRequest).run


def _seal(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, key=key, digest_size=SEAL_BYTES).digest()


def _decode(body: bytes, kind: type[_AnyRequest]) -> _AnyRequest:
    if body[0] != VERSION:
        raise ForeignMessage(
            f"the other end of a queue has version {body[0]} of its requests, this one {VERSION}; "
            "install the same version of stageline on every machine"
        )
    try:
        return msgspec.msgpack.decode(body[1:], type=kind)
    except ValueError as error:  # msgspec's own errors, and invalid UTF-8
        raise BadMessage(f"a request between queue ends is malformed: {error}") from error


def reply_to(request: CreditRequest, sender: Sender) -> RetentionReply:
    """Return the reply to `request`; it is true only if everything due was sent before."""
    log, (first, sent) = sender.log, sender.retention
    return RetentionReply(log.run, log.queue.name, sender.newest[0], request.serial, first, sent)


class Requester:
    """Decisions of when to request credit for `receiver`, over connections that may lose the request or its answer.

    While nothing arrives, the request is repeated after `FIRST_PAUSE`, then ever more rarely. Times are in seconds on
    the monotonic clock; `due` is when to call `request` again though nothing has happened.
    """

    def __init__(self, run: str, incarnation: int, receiver: Receiver) -> None:
        """Make a requester whose first request is due at once.

        Args:
            run: Id of the run.
            incarnation: Incarnation of this worker.
            receiver: Consumer's end of the queue.
        """
        self.receiver = receiver
        self.due = 0.0
        self._run = run
        self._incarnation = incarnation
        self._serial = 0
        self._resent = 0  # the serial of the newest request that wanted a resend
        self._ask = True
        self._pause = FIRST_PAUSE

    def introduce(self) -> None:
        """Make a request due at once, because there is a new producer, or a new connection to it."""
        self.receiver.report()
        self._ask = True
        self._pause = FIRST_PAUSE

    def rewind(self, number: int) -> None:
        """Request the messages from `number` on again."""
        self.receiver.rewind(number)
        self.receiver.restart()
        self.introduce()

    def postpone(self, now: float) -> None:
        """Delay the repetition of the request, because a message was accepted at time `now`."""
        self._pause = FIRST_PAUSE
        self.due = now + FIRST_PAUSE

    def request(self, now: float) -> CreditRequest | None:
        """Return the request to send to the producer now, if any; call `mark_sent` once it could be sent."""
        receiver = self.receiver
        late = now >= self.due
        if not receiver.must_report and not late:
            return None
        return CreditRequest(
            self._run,
            receiver.name,
            self._incarnation,
            self._serial + 1,
            next=receiver.next,
            credit=receiver.limit,
            resend=receiver.resend,
            ask=self._ask or late,
        )

    def mark_sent(self, request: CreditRequest, now: float) -> None:
        """Record that `request` was sent at time `now`."""
        self._serial = request.serial
        self.receiver.mark_reported(request.credit)
        if request.resend:
            self._resent = request.serial
        if request.ask:
            self.due = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._ask = False

    def receive(self, reply: RetentionReply) -> None:
        """Process the producer's reply. The reply followed everything sent before it, so what is not here now is lost.

        Raises `Fenced` if the producer serves a newer incarnation, `QueueGap` if it has forgotten the next message.
        """
        check_current(f"{self.receiver.name} is taken", reply.incarnation, self._incarnation)
        if reply.serial >= self._resent and self.receiver.was_sent(Retention(reply.first, reply.sent)):
            self.receiver.lose()
