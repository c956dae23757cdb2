"""All queues that begin at a worker, towards the workers that take from them: it grants their requests, and sends what
its senders have due. What a connection is, a transport knows.

    request of a consumer ──> Sender.update ──> what its credit allows is sent over the connection of that request
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from time import monotonic

import structlog

from stageline.broker.codec.message import Flow, Frame
from stageline.broker.errors import BadMessage, ForeignMessage
from stageline.broker.rate_limit import RateLimit

from .delivery import Sender
from .requests import CreditRequest, RetentionReply, pack, reply_to, run_named_in, unpack

EARLY = 64  # requests for queues that have no sender yet, or of unknown incarnations, which are kept, the newest
INTRODUCED = 20  # consumers of another run or version that are answered in a second; the others repeat their request
REFUSALS = 5  # log lines in a second about requests that are not of this run

log = structlog.get_logger()


class RouteGone(Exception):
    """The connection that something was to be sent over is gone."""


class OutboundLink(ABC):
    """Serves the senders given to `add`. `key` is the run's, which requests are sealed with.

    Never blocks: what cannot be sent now stays due.
    """

    def __init__(self, run: str, key: bytes) -> None:
        self._run = run
        self._key = key
        self._senders: dict[tuple[Flow, int], Sender] = {}  # by what their queues are called on the wire
        self._early: dict[tuple[Flow, int], tuple[bytes, CreditRequest]] = {}
        self._newest: float = inf  # incarnation of the run's workers
        self._refusals = RateLimit(REFUSALS)
        self._introductions = RateLimit(INTRODUCED)

    @abstractmethod
    def serve(self) -> None:
        """Takes in what requests have arrived, and sends everything that is due."""

    @abstractmethod
    def _send_message(self, route: bytes, frames: Sequence[Frame]) -> bool:
        """False if the connection takes nothing now. Raises `RouteGone`."""

    @abstractmethod
    def _send_reply(self, route: bytes, frame: bytes) -> None:
        """Does nothing if the connection is gone or takes nothing now: the consumer repeats its request."""

    def add(self, sender: Sender) -> None:
        self._senders[sender.log.key.wire] = sender
        self._answer_early()

    def admit(self, newest: int) -> None:
        """A request of an incarnation above `newest` is kept until there is one: its consumer may be known here sooner
        than the broker's news of it. Without that, one request of the highest number would shut out all others."""
        self._newest = newest
        self._answer_early()

    def flush_all(self) -> None:
        """Sends everything that is due, as far as the connections take it."""
        for sender in self._senders.values():
            self.flush(sender)

    def flush(self, sender: Sender) -> None:
        """Sends what is due of one queue, as far as its connection takes it."""
        number = sender.due()
        while number is not None and self._send(sender, number):
            number = sender.mark_sent(number)

    @property
    def is_behind(self) -> bool:
        """Whether there are messages that have not been sent."""
        return any(sender.is_behind for sender in self._senders.values())

    def take_in(self, route: bytes, frame: bytes) -> bool:
        """What came over connection `route`. False unless it is a request of this run."""
        try:
            request = unpack(frame, CreditRequest, self._key)
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
        key = request.key.wire
        if self._is_known(request):
            self._answer(self._senders[key], route, request)
            return
        early = self._early.pop(key, (route, request))
        if len(self._early) == EARLY:
            del self._early[next(iter(self._early))]
        self._early[key] = max(early, (route, request), key=lambda each: each[1].stamp)

    def _is_known(self, request: CreditRequest) -> bool:
        return request.key.wire in self._senders and request.incarnation <= self._newest

    def _answer_early(self) -> None:
        for key, (route, request) in list(self._early.items()):
            if self._is_known(request):
                del self._early[key]
                self._answer(self._senders[key], route, request)

    def _send(self, sender: Sender, number: int) -> bool:
        """False if the connection takes nothing now or is gone."""
        try:
            return sender.route is not None and self._send_message(sender.route, sender.frames(number))
        except RouteGone:
            sender.route = None
            return False

    def _refuse(self, route: bytes, frame: bytes, reason: str) -> None:
        """What is not proven to be of this run changes nothing. One of another run is told so."""
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
            self._send_reply(route, pack(reply_to(request, sender), self._key))

    def _introduce(self, route: bytes) -> None:
        """Lets a consumer of another run or version find out which these are: without the key, which is this run's."""
        if self._introductions.allows(monotonic()):
            self._send_reply(route, pack(RetentionReply(self._run, Flow.FORWARD, 0, 0, 0, 0, 0)))
