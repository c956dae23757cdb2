"""Queue ends of one worker among several processes, whichever transport carries the messages.

Workers that are connected to each other have one link for all queues that begin at a worker, and one to each worker
that it takes from:

    worker 0                                worker 1
    Outbound -- Sender -- OutboundLink      InboundLink -- Receiver -- Inbound
                                    <- CreditRequest
                                    messages ->

A connection promises nothing: what it held when it broke is lost. So the producer retains every message until it is
trimmed, and the consumer requests the next one again and again until it arrives. A worker that waits for one message
serves all its queues, because it may be waiting for one of their consumers.
"""

import os
import select
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, TypeVar

from stageline.broker.codec.message import Message
from stageline.broker.control.messages import StepDigest
from stageline.broker.control.queue_counts import Depth
from stageline.broker.errors import ForeignMessage, QueueClosed
from stageline.pipeline.program import Queue

from .base import Inbound, Outbound
from .delivery import Looking, Receiver, Sender
from .links import InboundLink, OutboundLink
from .log import SPILL, UNLIMITED, Log, RetentionBudget
from .memory import MemoryQueue, MemoryQueues
from .requests import Requester
from .secrets import NO_SECRETS, QueueSecrets
from .wakeup import Wakeup

Found = TypeVar("Found")

REPLIES = 8  # the part of `retain_bytes` that a worker's replies may take in memory besides
DIGESTS = 100_000  # of steps that are kept while the broker is away
ROOM_WAIT = 0.25  # seconds between two calls of `waiting` while a `put` waits for room


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Arguments with which a worker's queues are opened.

    `ahead`: the windows of all queues of the run together. `retain_bytes`: what may be retained in memory; beyond it,
    `spill_bytes` (None: four times as much) on the disk, in `spill_folder` (None: the system's); beyond that a `put`
    waits up to `patience` seconds, and calls `waiting` with the reason during the wait, which may call `trim`. Replies
    to a script have an eighth of `retain_bytes` for themselves, and the disk as far as it goes: a script that goes on
    from a checkpoint wants them again. `secrets` are those of the worker's place. `is_padded`: what is sealed is made
    longer, so that its length tells less. `wakes_at_once`: a `ring` ends a wait
    at once; without it, a wait over ZeroMQ may take 20 ms more, and costs less.
    """

    ahead: int = 64
    retain_bytes: int = UNLIMITED
    spill_bytes: int | None = None
    spill_folder: str | None = None
    waiting: Callable[[str], None] = lambda reason: None
    patience: float = 60.0
    secrets: QueueSecrets = NO_SECRETS
    is_padded: bool = False
    wakes_at_once: bool = False


class QueueEnds(ABC):
    """Ends of one worker's queues, each made on its first use; both ends of a queue within the worker are in memory."""

    def __init__(self, run: str, incarnation: int, options: QueueOptions) -> None:
        """Make the ends of the worker of this incarnation in the run with this id."""
        self.run = run
        self.incarnation = incarnation
        self.options = options
        spill_bytes = SPILL * options.retain_bytes if options.spill_bytes is None else options.spill_bytes
        self._budget = RetentionBudget(options.retain_bytes, spill_bytes, options.spill_folder, self._wait_for_room)
        self._replies = RetentionBudget(
            options.retain_bytes // REPLIES, UNLIMITED, options.spill_folder, self._wait_for_room
        )
        self._copies = RetentionBudget()  # views of files, a window of each at most
        self._local = MemoryQueues(run, self._budget)
        self.digests: deque[StepDigest] = deque(maxlen=DIGESTS)
        self._looking = Looking(processors())
        self._outbounds: dict[str, Outbound] = {}
        self._inbounds: dict[str, Inbound] = {}

    @abstractmethod
    def wait_for(self, look: Callable[[], Found | None], timeout: float) -> Found | None:
        """Return what `look` finds; None after `timeout` seconds or a `ring`. Serves the other queues until then."""

    @abstractmethod
    def _serve(self, seconds: float) -> None:
        """Serve the other queues for `seconds`, because a `put` waits for room."""

    @abstractmethod
    def _new_outbound(self, log: Log) -> Outbound:
        """Return the producer's end of the queue of `log`."""

    @abstractmethod
    def _new_inbound(self, receiver: Receiver) -> Inbound:
        """Return the consumer's end of the queue of `receiver`."""

    def outbound(self, queue: Queue) -> Outbound:
        """Return the producer's end of `queue`; the first call makes it."""
        if queue.name not in self._outbounds:
            if queue.is_local:
                self._outbounds[queue.name] = self._local.outbound(queue)
            else:
                budget = self._copies if queue.copies else self._replies if queue.answers else self._budget
                log = Log(self.run, queue, budget)
                self._outbounds[queue.name] = self._new_outbound(log)
        return self._outbounds[queue.name]

    def opened(self, name: str) -> Outbound | None:
        """Return the producer's end of the queue `name`, if it was made. Safe to call from any thread."""
        return self._outbounds.get(name)

    def inbound(self, queue: Queue) -> Inbound:
        """Return the consumer's end of `queue`; the first call makes it. Raises `ValueError` without a window."""
        if queue.name not in self._inbounds:
            if queue.is_local:
                self._inbounds[queue.name] = LocalInbound(self._local.inbound(queue), self.wait_for)
            else:
                self._inbounds[queue.name] = self._new_inbound(Receiver(queue))
        return self._inbounds[queue.name]

    def close(self) -> None:
        """Close the queues within this worker, and forget what is on the disk."""
        self._local.close()
        self._budget.spill.close()
        self._replies.spill.close()

    def _wait_for_room(self, reason: str, since: float) -> bool:
        """Serve the queues for a while. Returns False if a `put` that began at `since` has waited long enough."""
        self.options.waiting(reason)
        if monotonic() - since >= self.options.patience:
            return False
        self._serve(ROOM_WAIT)
        return True


def look_until(until: float, find: Callable[[], Found | None]) -> Found | None:
    """Return what `find` finds before time `until`, called in a loop after other threads and processes; else None."""
    while monotonic() < until:
        if (found := find()) is not None:
            return found
        os.sched_yield()
    return None


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalInbound:
    """Consumer's end of a queue that begins at the same worker: it serves the other queues while it waits."""

    def __init__(self, queue: MemoryQueue, wait_for: Callable[..., Message | None]) -> None:
        """Wrap `queue`; `wait_for` is `QueueEnds.wait_for` of the worker."""
        self.queue = queue.queue
        self.rewind = queue.rewind
        self.intake = queue.intake
        self._queue = queue
        self._wait_for = wait_for

    def take(self, timeout: float) -> Message | None:
        """Return the next message in order, or None after `timeout` seconds, as `Inbound.take`."""
        message = self._queue.take(0)
        return message if message or timeout <= 0 else self._wait_for(lambda: self._queue.take(0), timeout)


class LinkedQueues(QueueEnds):
    """All queue ends of one worker; other workers connect to its producers at `endpoint`.

    Only the thread that made the object may use it, except for `ring`.
    """

    outbound_link: OutboundLink
    endpoint: str
    schemes: tuple[str, ...]  # of the endpoints that it can connect to

    def __init__(self, run: str, incarnation: int, options: QueueOptions) -> None:
        """Make the ends without links; a subclass opens `outbound_link`."""
        super().__init__(run, incarnation, options)
        self._closed = False
        self._links: dict[str, InboundLink] = {}  # by the producers' endpoints
        self._wakeup = Wakeup()
        self.ring = self._wakeup.ring  # ends the wait of `take` or `pump`

    @abstractmethod
    def _open_link(self, endpoint: str) -> InboundLink:
        """Return a link to the producers at `endpoint`."""

    @abstractmethod
    def _ready(self, watched: dict[Any, int], seconds: float) -> Collection[Any]:
        """Return the handles of `watched`, which gives the events to wait for, that are ready within `seconds`."""

    def connect(self, peers: Mapping[Queue, str]) -> None:
        """Take each queue from the producer at its endpoint. Raises `ForeignMessage` for one of another scheme."""
        for queue, endpoint in peers.items():
            end = self.inbound(queue)
            if isinstance(end, LinkedInbound):
                link = self._link_to(endpoint)
                for other in self._links.values():
                    other.remove(queue.name)
                end.attach(link)
        for endpoint in [endpoint for endpoint, link in self._links.items() if not link.requesters]:
            self._links.pop(endpoint).close()
        self._send_requests()

    def admit(self, newest: int) -> None:
        """Let requests of an incarnation above `newest` wait, as `OutboundLink.admit`."""
        self.outbound_link.admit(newest)

    def rekey(self, secrets: QueueSecrets) -> None:
        """Use other secrets from now on, as `WorkerQueues.rekey`."""
        self.options = replace(self.options, secrets=secrets)
        self.outbound_link.rekey(secrets.requests)
        for link in self._links.values():
            link.rekey(secrets.requests)

    def pump(self, timeout: float) -> None:
        """Serve the requests of the other ends, waiting up to `timeout` seconds for one. Raises `QueueClosed`."""
        self.check_open()
        if timeout > 0:
            self._poll(monotonic() + timeout)
        else:
            self.outbound_link.serve()

    def close(self) -> None:
        """Close the queues, after a second at most for what is on its way out."""
        if not self._closed:
            self._closed = True
            for link in self._links.values():
                link.close()
            self.outbound_link.close()
            self._wakeup.close()
            super().close()

    def check_open(self) -> None:
        """Raise `QueueClosed` after `close`."""
        if self._closed:
            raise QueueClosed(f"the queues of incarnation {self.incarnation} in run {self.run!r} are closed")

    def take(self, link: InboundLink, receiver: Receiver, timeout: float) -> Message | None:
        """Return the next message of the receiver, over `link`; None after `timeout` seconds or a `ring`.

        Polls for the message for a while, and then waits for it asleep. That wait serves the consumers of this worker:
        it begins at once while they have yet to request messages, on which this message may depend.
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
        """Return what `look` finds after each arrival; None after `timeout` seconds or a `ring`."""
        until = monotonic() + timeout
        while True:
            rung = self._poll(until)
            found = look()
            if found is not None or rung or monotonic() >= until:
                return found

    def _poll(self, until: float) -> bool:
        """Wait for arrivals, a due request, `ring` or monotonic time `until`; process arrivals. Return True if rung."""
        self._send_requests()
        now, links, fd = monotonic(), self._links.values(), self._wakeup.fd
        arriving = {link.handle: link for link in links if link.handle is not None}
        watched = {handle: link.events for handle, link in arriving.items()}
        watched |= {fd: select.POLLIN, **self.outbound_link.watched(now)}
        ready = self._ready(watched, min([until, self.outbound_link.due(now), *[link.due for link in links]]) - now)
        now = monotonic()
        for handle in ready:
            if handle in arriving:
                arriving[handle].receive(now)  # only one, so that it can be taken at once; the next turn has the rest
        if any(handle != fd and handle not in arriving for handle in ready):
            self.outbound_link.serve()
        if rung := fd in ready:
            self._wakeup.silence()
        return rung

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

    def _reopen_links(self) -> None:
        """Connect to every producer again, with the present secrets."""
        for endpoint, link in list(self._links.items()):
            link.close()
            self._links[endpoint] = self._open_link(endpoint)
            for end in self._inbounds.values():
                if isinstance(end, LinkedInbound) and end.link is link:
                    end.attach(self._links[endpoint])

    def _send_requests(self) -> None:
        for link in self._links.values():
            link.send_requests(monotonic())

    def _serve(self, seconds: float) -> None:
        self._poll(monotonic() + seconds)

    def _new_outbound(self, log: Log) -> "LinkedOutbound":
        sender = Sender(log)
        self.outbound_link.add(sender)
        return LinkedOutbound(self, sender)

    def _new_inbound(self, receiver: Receiver) -> "LinkedInbound":
        return LinkedInbound(self, Requester(self.run, self.incarnation, receiver))


class LinkedOutbound:
    """Producer's end: it sends at once what the consumer has granted, and the rest when the consumer grants more."""

    def __init__(self, queues: LinkedQueues, sender: Sender) -> None:
        """Make the end over `sender`, which the outbound link of `queues` serves."""
        self.queue = sender.log.queue
        self.trim = sender.log.trim
        self.empty = sender.log.empty
        self.checksums = sender.log.checksums
        self.look = sender.log.look
        self.peek = sender.log.peek
        self._queues = queues
        self._link = queues.outbound_link
        self._sender = sender

    def put(self, message: Message) -> None:
        """Retain `message`, and send what the consumer has granted, as `Outbound.put`."""
        self._queues.check_open()
        self._sender.log.put(message, monotonic())
        self._link.flush(self._sender)
        if self._sender.is_behind:
            self._link.serve()

    def has_credit(self, number: int, timeout: float) -> bool:
        """Return True if the consumer has granted message `number`; wait up to `timeout` seconds for that."""
        self._queues.check_open()
        granted = number < self._sender.limit
        return granted or bool(self._queues.wait_for(lambda: number < self._sender.limit or None, timeout))

    @property
    def held(self) -> range:
        """Numbers of the retained messages. Safe to read from any thread."""
        return self._sender.log.held

    def depth(self) -> Depth:
        """Return the queue's content and positions for inspection."""
        return self._sender.depth(monotonic())


class LinkedInbound:
    """Consumer's end, over `link` once the endpoint of the producer is known."""

    def __init__(self, queues: LinkedQueues, requester: Requester) -> None:
        """Make the end over `requester`, without a link."""
        self.queue = requester.receiver.queue
        self.intake = requester.receiver.intake
        self.requester = requester
        self.link: InboundLink | None = None
        self._queues = queues

    def attach(self, link: InboundLink) -> None:
        """Request the messages over `link`, and take them from it."""
        self.link = link
        link.add(self.requester)

    def take(self, timeout: float) -> Message | None:
        """Return the next message in order, or None after `timeout` seconds or a `ring`, as `Inbound.take`."""
        link, receiver, queues = self.link, self.requester.receiver, self._queues
        queues.check_open()
        if link is None:
            return queues.wait_for(lambda: None, timeout) if timeout > 0 else None
        return queues.take(link, receiver, timeout)

    def rewind(self, step: int) -> None:
        """Deliver again from the first message of `step` on."""
        self.requester.rewind(self.queue.first(step))
