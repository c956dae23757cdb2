"""The queue ends of a worker that is connected to others: one link for all that begins here, one to each worker from
which something is taken.

    worker 0                                worker 1
    Outbound -- Sender -- OutboundLink      InboundLink -- Receiver -- Inbound
                                    <- CreditRequest
                                    messages ->

A connection promises nothing: what it held when it broke is lost. So the producer retains every message until it is
trimmed, and the consumer requests the next one again and again until it arrives.

A worker that waits for one message serves all its queues meanwhile: it may be waiting for one of their consumers.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from time import monotonic

from stageline.broker.codec.message import Message
from stageline.broker.errors import ForeignMessage, QueueClosed

from .base import Depth, QueueKey
from .delivery import Receiver, Sender
from .ends import Found, QueueEnds, QueueOptions, Wakeup, look_until
from .links import InboundLink, OutboundLink
from .log import Log
from .requests import Requester


class LinkedQueues(QueueEnds):
    """All queue ends of one worker; other workers connect to its producers at `endpoint`.

    Only the thread that made it may use it, except for `ring`.
    """

    outbound_link: OutboundLink
    endpoint: str
    schemes: tuple[str, ...]  # of the endpoints that it can connect to

    def __init__(self, run: str, incarnation: int, options: QueueOptions) -> None:
        super().__init__(run, incarnation, options)
        self._closed = False
        self._links: dict[str, InboundLink] = {}  # by the producers' endpoints
        self._wakeup = Wakeup()
        self.ring = self._wakeup.ring  # ends the wait of `take` or `pump`

    @abstractmethod
    def _open_link(self, endpoint: str) -> InboundLink:
        """A link to the producers at `endpoint`."""

    @abstractmethod
    def _poll(self, until: float) -> bool:
        """Waits until something arrives, a request is to be repeated, or the time `until`, and takes in what has
        arrived. True if `ring` was called."""

    @abstractmethod
    def _close_links(self) -> None:
        """Called once."""

    def connect(self, peers: Mapping[QueueKey, str]) -> None:
        """Takes each of these queues from the producer at its endpoint, from now on. Raises `ForeignMessage` for an
        endpoint of another kind of queues."""
        for key, endpoint in peers.items():
            end = self.inbound(key)
            if isinstance(end, LinkedInbound):
                link = self._link_to(endpoint)
                for other in self._links.values():
                    other.remove(key)
                end.link = link
                link.add(end.requester)
        for endpoint in [endpoint for endpoint, link in self._links.items() if not link.requesters]:
            self._links.pop(endpoint).close()
        self._send_requests()

    def admit(self, newest: int) -> None:
        self.outbound_link.admit(newest)

    def pump(self, timeout: float) -> None:
        self.check_open()
        if timeout > 0:
            self._poll(monotonic() + timeout)
        else:
            self.outbound_link.serve()

    def close(self) -> None:
        """Waits a second at most for what is on its way out."""
        if not self._closed:
            self._closed = True
            self._close_links()
            self._wakeup.close()
            super().close()

    def check_open(self) -> None:
        """Raises `QueueClosed` after `close`."""
        if self._closed:
            raise QueueClosed(f"the queues of incarnation {self.incarnation} in run {self.run!r} are closed")

    def take(self, link: InboundLink, receiver: Receiver, timeout: float) -> Message | None:
        """The next message of the receiver, over `link`; None after `timeout` seconds or a `ring`.

        It is looked for again and again for a while, and then waited for, asleep. That wait serves the consumers of
        this worker: it begins at once while they have yet to request messages, on which this one may depend.
        """
        message = link.take(receiver)
        if message is not None or timeout <= 0:
            return message
        began, seconds = monotonic(), 0.0 if self.outbound_link.is_behind else self._looking.seconds()
        if seconds:
            message = look_until(began + seconds, lambda: link.take(receiver) if link.has_arrived() else None)
        if message is not None:
            self._looking.ended(seconds, 0.0)
            return message
        message = self._sleep(link, receiver, timeout)
        self._looking.ended(seconds, None if message is None else monotonic() - began)
        return message

    def wait_for(self, look: Callable[[], Found | None], timeout: float) -> Found | None:
        until = monotonic() + timeout
        while True:
            rung = self._poll(until)
            found = look()
            if found is not None or rung or monotonic() >= until:
                return found

    def _sleep(self, link: InboundLink, receiver: Receiver, timeout: float) -> Message | None:
        return self.wait_for(lambda: link.pop(receiver), timeout)

    def _link_to(self, endpoint: str) -> InboundLink:
        if not endpoint.startswith(self.schemes):
            raise ForeignMessage(
                f"the queues of another worker are at {endpoint}, this one's at {self.endpoint}; set the same "
                "queues.url for every worker"
            )
        if endpoint not in self._links:
            self._links[endpoint] = self._open_link(endpoint)
        return self._links[endpoint]

    def _send_requests(self) -> None:
        now = monotonic()
        for link in self._links.values():
            link.send_requests(now)

    def _serve(self, seconds: float) -> None:
        self._poll(monotonic() + seconds)

    def _new_outbound(self, log: Log) -> "LinkedOutbound":
        sender = Sender(log)
        self.outbound_link.add(sender)
        return LinkedOutbound(self, sender)

    def _new_inbound(self, key: QueueKey, window: int) -> "LinkedInbound":
        return LinkedInbound(self, Requester(self.run, self.incarnation, Receiver(key, window)))


class LinkedOutbound:
    """The producer's end: it sends at once what the consumer has granted, and the rest when that grants more."""

    def __init__(self, queues: LinkedQueues, sender: Sender) -> None:
        self.key = sender.log.key
        self.trim = sender.log.trim
        self.empty = sender.log.empty
        self.checksums = sender.log.checksums
        self.peek = sender.log.peek
        self._queues = queues
        self._link = queues.outbound_link
        self._sender = sender

    def put(self, message: Message) -> None:
        self._queues.check_open()
        self._sender.log.put(message, monotonic())
        self._link.flush(self._sender)
        if self._sender.is_behind:
            self._link.serve()

    def has_credit(self, number: int, timeout: float) -> bool:
        self._queues.check_open()
        if number < self._sender.limit:
            return True
        granted = self._queues.wait_for(lambda: number < self._sender.limit or None, timeout)
        return bool(granted)

    def depth(self) -> Depth:
        return self._sender.depth(monotonic())


class LinkedInbound:
    """The consumer's end, over `link` once the endpoint of the producer is known."""

    def __init__(self, queues: LinkedQueues, requester: Requester) -> None:
        self.key = requester.receiver.key
        self.requester = requester
        self.link: InboundLink | None = None
        self._queues = queues

    def take(self, timeout: float) -> Message | None:
        link, receiver, queues = self.link, self.requester.receiver, self._queues
        queues.check_open()
        if link is None:
            return queues.wait_for(lambda: None, timeout) if timeout > 0 else None
        return queues.take(link, receiver, timeout)

    def rewind(self, step: int) -> None:
        self.requester.rewind(step * self.key.per_step(self._queues.options.microbatches))
