"""Two sides of a connection between workers, without the connection itself, which a transport knows.

request of a consumer ──> Sender.update ──> what its credit allows is sent over the connection of that request
message of a producer ──> Receiver.accept   what arrives damaged or out of turn is dropped and requested again
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from time import monotonic
from typing import Any

import structlog

from stageline.broker.codec.message import Frame, Message, check_run, complete, fingerprint, read_header
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.broker.rate_limit import RateLimit

from .delivery import TOO_OFTEN, Receiver, Sender
from .requests import CreditRequest, Requester, RetentionReply, pack, reply_to, run_named_in, unpack
from .secrets import Keys

EARLY = 64  # requests for queues that have no sender yet, or of unknown incarnations, which are kept, the newest
INTRODUCED = 20  # consumers of another run or version that are answered in a second; the others repeat their request
REFUSALS = 5  # log lines in a second about requests that are not of this run

_INTRODUCTION = "none"  # the queue that an introduction is about

log = structlog.get_logger()


class RouteGone(Exception):
    """Error that the connection which something was to be sent over is gone."""


class OutboundLink(ABC):
    """Server of the senders given to `add`: it takes in requests of consumers and sends what they grant.

    A link never blocks: what cannot be sent now stays due.
    """

    def __init__(self, run: str, keys: Keys) -> None:
        """Make a link without senders that knows no limit of incarnations.

        Args:
            run: Id of the run, which requests must name.
            keys: Keys of the worker's queues, which requests are sealed with.
        """
        self._run = run
        self._keys = keys
        self._senders: dict[str, Sender] = {}  # by the names of their queues, as are all below
        self._early: dict[str, tuple[bytes, CreditRequest]] = {}
        self._newest: float = inf  # incarnation of the run's workers
        self._refusals = RateLimit(REFUSALS)
        self._introductions = RateLimit(INTRODUCED)

    @abstractmethod
    def serve(self) -> None:
        """Process the requests that have arrived and send everything that is due."""

    @abstractmethod
    def watched(self, now: float) -> dict[Any, int]:
        """Return the handles to poll, each with the events that make it time to `serve`."""

    def due(self, now: float) -> float:
        """Return the time at which to look at `watched` again though nothing has happened; infinite for never."""
        return inf

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""

    @abstractmethod
    def _send_message(self, route: bytes, frames: Sequence[Frame]) -> bool:
        """Send a message over connection `route`. Returns False if that takes nothing now; raises `RouteGone`."""

    @abstractmethod
    def _send_reply(self, route: bytes, frame: bytes) -> None:
        """Send a reply over connection `route`, or do nothing if the connection is gone or takes nothing now.

        The consumer repeats a request that gets no reply.
        """

    def add(self, sender: Sender) -> None:
        """Serve `sender` from now on, beginning with a request that came before it."""
        self._senders[sender.log.queue.name] = sender
        self._answer_early()

    def admit(self, newest: int) -> None:
        """Keep requests of incarnations above `newest` until `admit` allows them.

        A consumer's request may arrive here sooner than the broker's news of that consumer. Without this limit, one
        request of the highest number would shut out all others.
        """
        self._newest = newest
        self._answer_early()

    def rekey(self, keys: Keys) -> None:
        """Seal with these keys from now on. A request with a former one is refused, and its consumer repeats it."""
        self._keys = keys

    def flush_all(self) -> None:
        """Send everything that is due, as far as the connections take it."""
        for sender in self._senders.values():
            self.flush(sender)

    def flush(self, sender: Sender) -> None:
        """Send what is due of one queue, as far as its connection takes it."""
        number = sender.due()
        while number is not None and self._send(sender, number):
            number = sender.mark_sent(number)

    @property
    def is_behind(self) -> bool:
        """True if there are messages that have not been sent."""
        return any(sender.is_behind for sender in self._senders.values())

    def take_in(self, route: bytes, frame: bytes) -> bool:
        """Process `frame`, which came over connection `route`. Returns False unless it is a request of this run."""
        try:
            request = unpack(frame, CreditRequest, self._keys)
        except ForeignMessage:
            self._introduce(route)
            return False
        except BadMessage as error:  # if it was damaged, the consumer will repeat it
            self._refuse(route, frame, str(error))
            return False
        if request.run != self._run:
            self._introduce(route)
            return False
        self._grant(route, request)
        return True

    def _grant(self, route: bytes, request: CreditRequest) -> None:
        name = request.queue
        if self._is_known(request):
            self._answer(self._senders[name], route, request)
            return
        early = self._early.pop(name, (route, request))
        if len(self._early) == EARLY:
            del self._early[next(iter(self._early))]
        self._early[name] = max(early, (route, request), key=lambda each: each[1].stamp)

    def _is_known(self, request: CreditRequest) -> bool:
        return request.queue in self._senders and request.incarnation <= self._newest

    def _answer_early(self) -> None:
        for name, (route, request) in list(self._early.items()):
            if self._is_known(request):
                del self._early[name]
                self._answer(self._senders[name], route, request)

    def _send(self, sender: Sender, number: int) -> bool:
        """Send message `number`. Returns False if the connection takes nothing now or is gone."""
        try:
            return sender.route is not None and self._send_message(sender.route, sender.frames(number))
        except RouteGone:
            sender.lose_route()
            return False

    def _refuse(self, route: bytes, frame: bytes, reason: str) -> None:
        """Log a request that is not proven to be of this run, and do nothing else.

        A worker of another run is told which run this is.
        """
        with suppress(BadMessage):
            if run_named_in(frame) != self._run:
                self._introduce(route)
        self._log_refusal(reason)

    def _log_refusal(self, reason: str) -> None:
        if self._refusals.allows(monotonic()):
            log.warning("refused", reason=reason, before=self._refusals.take_withheld())

    def _answer(self, sender: Sender, route: bytes, request: CreditRequest) -> None:
        sender.update(request.to_credit(), route)
        self.flush(sender)
        if request.ask:
            self._send_reply(route, pack(reply_to(request, sender), self._keys))

    def _introduce(self, route: bytes) -> None:
        """Tell a consumer of another run or version which these are here, without a key in the seal."""
        if self._introductions.allows(monotonic()):
            self._send_reply(route, pack(RetentionReply(self._run, _INTRODUCTION, 0, 0, 0, 0)))


class InboundLink(ABC):
    """Client of the producers at `endpoint` for the requesters given to `add`. Times are monotonic, in seconds."""

    def __init__(self, endpoint: str, run: str, keys: Keys) -> None:
        """Make a link without requesters.

        Args:
            endpoint: Address of the producers' worker.
            run: Id of the run, which messages must name.
            keys: Keys of the worker's queues, which requests and replies are sealed with.
        """
        self.endpoint = endpoint
        self.requesters: dict[str, Requester] = {}  # by the names of their queues
        self._keys = keys
        self._run = run
        self._damages = 0

    @abstractmethod
    def receive(self, now: float, *, wait: bool = False) -> bool:
        """Process one message. Returns False if none has arrived.

        Args:
            now: Time of the call.
            wait: If True, wait some milliseconds for a message that has not arrived.

        Raises:
            ForeignMessage: The message is of another run or version.
            BrokerError: Messages contradict each other, as `Receiver` says.
        """

    @abstractmethod
    def has_arrived(self) -> bool:
        """Return True if `receive` would find a message: this check takes less time than a `receive` in vain."""

    @abstractmethod
    def send_requests(self, now: float) -> None:
        """Send the requests that are due, as far as there is a connection."""

    @property
    @abstractmethod
    def handle(self) -> Any:
        """Handle to poll for arrivals, hashable; None without a connection."""

    @property
    @abstractmethod
    def events(self) -> int:
        """Events to poll `handle` for."""

    @property
    @abstractmethod
    def due(self) -> float:
        """Time at which to call `send_requests` again though nothing has happened."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; no more messages are requested."""

    def add(self, requester: Requester) -> None:
        """Request messages for `requester` over this link from now on."""
        self.requesters[requester.receiver.name] = requester
        requester.introduce()

    def remove(self, queue: str) -> None:
        """Stop serving the queue of this name, if this link serves it: another connection carries it now."""
        self.requesters.pop(queue, None)

    def rekey(self, keys: Keys) -> None:
        """Seal with these keys from now on."""
        self._keys = keys

    def take(self, receiver: Receiver, *, wait: bool = False) -> Message | None:
        """Return the next message of the receiver, or None. With `wait`, wait for it as `receive` does."""
        now = monotonic()
        while not receiver.ready and self.receive(now, wait=wait):
            wait = False
        return self.pop(receiver)

    def pop(self, receiver: Receiver) -> Message | None:
        """Return the next message of the receiver among those that `receive` has taken in, or None."""
        message = receiver.pop() if receiver.ready else None
        if receiver.must_report:
            self.send_requests(monotonic())
        return message

    def _pack(self, request: CreditRequest) -> bytes:
        return pack(request, self._keys)

    def _take_in(self, frames: Sequence[Frame], now: float) -> None:
        """Process the frames of a message or of a reply; a reply has an empty frame in place of the header."""
        try:
            if len(frames[0]):
                self._take_in_message(frames, now)
            else:
                self._take_in_reply(b"".join(frames[1:]))
        except ForeignMessage:
            raise
        except BadMessage as error:
            self._count_damage(str(error))
        else:
            self._damages = 0

    def _take_in_message(self, frames: Sequence[Frame], now: float) -> None:
        header = read_header(frames[0])
        check_run(header, self._run)
        requester = self.requesters.get(header.queue)
        if requester is None:  # of a queue that has moved to another connection
            return
        receiver, bits = requester.receiver, fingerprint(header)
        whole = len(frames) > 1 or not header.tensors
        if not receiver.accepts(header.number, bits, whole=whole):
            return
        try:
            message = complete(header, frames[1:])
        except BadMessage as error:
            receiver.count_damage(str(error))
            receiver.lose()
        else:
            receiver.accept(message, bits)
            requester.postpone(now)

    def _take_in_reply(self, frame: bytes) -> None:
        reply = self._unpack_reply(frame)
        if reply.run != self._run:
            raise ForeignMessage(
                f"the worker at {self.endpoint} belongs to run {reply.run!r}, this one to run {self._run!r}; "
                "two runs share a queue address: give one of them another queues.url"
            )
        if requester := self.requesters.get(reply.queue):
            requester.receive(reply)

    def _unpack_reply(self, frame: bytes) -> RetentionReply:
        """Return the reply in `frame`, or the introduction of a producer of another run, which is sealed without a key.

        Of this run nothing counts without its seal.
        """
        try:
            return unpack(frame, RetentionReply, self._keys)
        except ForeignMessage:
            raise
        except BadMessage:
            introduction = unpack(frame, RetentionReply)
            if introduction.run == self._run:
                raise
            return introduction

    def _count_damage(self, reason: str) -> None:
        """Count a damaged arrival of an unknown queue, after which all receivers request again."""
        self._damages += 1
        if self._damages > TOO_OFTEN:
            raise BadMessage(
                f"{self._damages} messages in a row from the worker at {self.endpoint} arrived damaged: {reason}"
            )
        for requester in self.requesters.values():
            requester.receiver.lose()
