"""Queues over a Redis server (or Valkey): workers need nothing but a connection to it. `entries.py` has its keys.

    worker 0                                                       worker 1
    put -> Log -- Writer -- Sender ---->  Redis  ----> Receiver -- Reader -> take
                  Writer -- Receiver <--         <---- Sender ---- Reader
    computing  |  threads of their own  |        |  threads of their own  |  computing

The server keeps every message until it is trimmed, and so does its producer, who puts it again if the server forgot.
"""

import select
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TypeVar

from stageline.broker.codec.message import Message
from stageline.broker.errors import QueueClosed
from stageline.broker.network.redis_connection import RedisLink
from stageline.broker.queues.base import Depth, Inbound, Outbound, QueueKey, Trouble
from stageline.broker.queues.endpoints import Endpoints, QueueOptions
from stageline.broker.queues.log import Log
from stageline.broker.queues.wakeup import Wakeup
from stageline.pipeline.plan.passwords import masked

from .reader import Reader
from .receiver_thread import ReceiverThread
from .sender_thread import SenderThread
from .writer import Writer

TURN = 0.25  # seconds after which somebody who waits for room is called again
LINGER = 1.0  # seconds that closing waits for what is on its way out
LEAVING = 2.0  # seconds that closing waits for the threads

_Found = TypeVar("_Found")


class RedisQueues:
    """All queue ends of one worker, over the server at `url`: `redis://`, `rediss://` (TLS) or `unix://`.

    A server that cannot be reached is waited for, the terms' `patience` at the start and without end later; `trouble`
    says so. What producers of the incarnation `since` or an older one have said counts for nothing.

    Only the thread that made it may use it, but for `ring`. Raises `RedisUnfit` for a URL that cannot be understood;
    whoever uses it later gets `RedisAway` if the server never came, `RedisUnfit` if it cannot be used as it is.
    """

    def __init__(self, run: str, incarnation: int, url: str, terms: QueueOptions, *, since: int = 0) -> None:
        self.endpoint = masked(url)
        self._run = run
        self._incarnation = incarnation
        self._terms = terms
        self._since = since
        self._ends = Endpoints(run, terms, self._wait_for_room, self.wait_for)
        self._failure: Exception | None = None
        self._rung = self._waits = self._closed = False
        self.changed = threading.Condition()
        self._links = RedisLink(url), RedisLink(url)
        self._bell = Wakeup()
        self._poll = select.poll()
        self._poll.register(self._bell.fileno(), select.POLLIN)
        self._sender = SenderThread(self._links[0], self.changed, run, terms.microbatches, terms.patience)
        self.kick = self._sender.kick
        self._receiver = ReceiverThread(self._links[1], self.changed, self._sender.kick, self._wake)
        duties = {"sender": self._sender.run, "receiver": self._receiver.run}
        self._threads = [
            self._start(name, work, link) for (name, work), link in zip(duties.items(), self._links, strict=True)
        ]

    def outbound(self, key: QueueKey) -> Outbound:
        return self._ends.outbound(key, self._new_outbound)

    def inbound(self, key: QueueKey) -> Inbound:
        return self._ends.inbound(key, self._new_inbound)

    def connect(self, peers: Mapping[QueueKey, str]) -> None:
        """Everybody meets at the server: nothing to do."""

    @property
    def trouble(self) -> Trouble | None:
        """Why messages do not move now, if the server is away or refuses them. For any thread."""
        return self._sender.trouble

    @property
    def forgotten(self) -> int:
        """How many messages of this worker the server had and forgot; they were put again."""
        return sum(writer.forgotten for writer in self._sender.writers)

    def ring(self) -> None:
        """Lets whoever waits in `take` or `pump` return early. For any thread, and for signal handlers."""
        self._rung = True
        self._bell.ring()

    def pump(self, timeout: float) -> None:
        """The threads serve; this waits for a ring. Raises what went wrong in them."""
        self.check_open()
        if timeout > 0:
            self.wait_for(lambda: None, timeout)

    def flush(self, timeout: float) -> bool:
        """Waits until the server has all that may be sent to it now. False if it has not after `timeout` seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: self._sender.settled or self._failure is not None, timeout)

    def close(self) -> None:
        """Waits a second at most for what is on its way out."""
        if self._closed:
            return
        if self.trouble is None:
            self.flush(LINGER)
        self._closed = True
        with self.changed:
            self._sender.closing = self._receiver.closing = True
            self.changed.notify_all()
        self._links[1].close()  # the receiver waits there for what may come
        for thread in self._threads:
            thread.join(LEAVING)
        self._ends.close()
        self._bell.close()

    def check_open(self) -> None:
        """Raises what went wrong in a thread, `QueueClosed` after `close`."""
        if self._closed:
            raise QueueClosed(f"the queues of incarnation {self._incarnation} in run {self._run!r} are closed")
        if self._failure is not None:
            raise self._failure

    def wait_for(self, look: Callable[[], _Found | None], timeout: float) -> _Found | None:
        """What `look` finds; None after `timeout` seconds or a ring."""
        until = monotonic() + timeout
        self._waits = True
        try:
            while True:
                self.check_open()
                rung, self._rung = self._rung, False
                found = look()
                pause = until - monotonic()
                if found is not None or rung or pause <= 0:
                    return found
                self._poll.poll(max(1, 1000 * pause))
                self._bell.silence()
        finally:
            self._waits = False

    def _wake(self) -> None:
        if self._waits:
            self._bell.ring()

    def _start(self, name: str, work: Callable[[], None], link: RedisLink) -> threading.Thread:
        thread = threading.Thread(target=self._guard, args=(work, link), name=f"redis {name}", daemon=True)
        thread.start()
        return thread

    def _guard(self, work: Callable[[], None], link: RedisLink) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the queues are used
            with self.changed:
                self._failure = error
                self._sender.closing = self._receiver.closing = True
                self.changed.notify_all()
            self._wake()
        finally:
            link.close()

    def _wait_for_room(self, reason: str, since: float) -> bool:
        """Lets the others work for a while. False when a `put` that began at `since` has waited long enough."""
        self._terms.waiting(reason)
        if monotonic() - since >= self._terms.patience:
            return False
        self.changed.wait(TURN)
        self.check_open()
        return True

    def _new_outbound(self, log: Log) -> "RedisOutbound":
        writer = Writer(log, self._incarnation)
        with self.changed:
            self._sender.writers.append(writer)
            self._receiver.writers.append(writer)
            self.kick()
        return RedisOutbound(self, writer)

    def _new_inbound(self, key: QueueKey, window: int) -> "RedisInbound":
        microbatches, limits = self._terms.microbatches, self._terms.limits
        reader = Reader(self._run, key, self._incarnation, window, microbatches, limits, self._since)
        with self.changed:
            self._sender.readers.append(reader)
            self._receiver.readers.append(reader)
            self.kick()
        return RedisInbound(self, reader, microbatches)


class RedisOutbound:
    """The producer's end."""

    def __init__(self, queues: RedisQueues, writer: Writer) -> None:
        self.key = writer.log.key
        self._queues = queues
        self._writer = writer

    def put(self, message: Message) -> None:
        self._queues.check_open()
        with self._queues.changed:
            self._writer.log.put(message, monotonic())
            self._queues.kick()

    def trim(self, step: int) -> None:
        with self._queues.changed:
            self._writer.log.trim(step)
            self._queues.kick()

    def depth(self) -> Depth:
        with self._queues.changed:
            return self._writer.depth(monotonic())

    def peek(self, limit: int) -> list[Message]:
        with self._queues.changed:
            return self._writer.log.peek(limit)


class RedisInbound:
    """The consumer's end."""

    def __init__(self, queues: RedisQueues, reader: Reader, microbatches: int) -> None:
        self.key = reader.key
        self._queues = queues
        self._reader = reader
        self._microbatches = microbatches

    def take(self, timeout: float) -> Message | None:
        self._queues.check_open()
        return self._queues.wait_for(self._look, timeout) if timeout > 0 else self._look()

    def rewind(self, step: int) -> None:
        with self._queues.changed:
            self._reader.rewind(step * self._microbatches)
            self._queues.kick()

    def _look(self) -> Message | None:
        with self._queues.changed:
            message = self._reader.pop()
            if self._reader.wants:
                self._queues.kick()
            return message
