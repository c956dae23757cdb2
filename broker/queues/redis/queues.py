"""Queues over a Redis server (or Valkey): workers need nothing but a connection to it. `entries.py` has its keys.

    worker 0                                                       worker 1
    put -> Sender ── StreamWriter ── sender thread ──>  Redis  ──> receiver thread ── StreamReader ── Receiver -> take
                     StreamWriter <─ receiver thread           <── sender thread ──── StreamReader
    computing      |     threads of their own        |         |     threads of their own        |        computing

The server keeps every message until it is trimmed, and so does its producer, which adds it again if the server forgot.
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
from stageline.broker.queues.ends import QueueEnds, QueueOptions
from stageline.broker.queues.log import Log
from stageline.broker.queues.receiver import Receiver
from stageline.broker.queues.sender import Sender
from stageline.broker.queues.wakeup import Wakeup
from stageline.pipeline.plan.addresses import masked

from .receiver_thread import ReceiverThread
from .sender_thread import SenderThread
from .stream_reader import StreamReader
from .stream_writer import StreamWriter

ROOM_WAIT = 0.25  # seconds between two calls of `waiting` while a `put` waits for room
LINGER = 1.0  # seconds that closing waits for what is on its way out
JOIN_TIMEOUT = 2.0  # seconds that closing waits for the threads

_Found = TypeVar("_Found")


class RedisQueues:
    """All queue ends of one worker, over the server at `url`: `redis://`, `rediss://` (TLS) or `unix://`.

    A server that cannot be reached is waited for, at the start for the options' `patience`, later without end;
    `trouble` says so. Announcements of producers of the incarnation `since` or an older one are ignored.

    Only the thread that made it may use it, except for `ring`. Raises `RedisUnfit` for a URL that cannot be understood;
    its methods raise `RedisAway` if the server never came, `RedisUnfit` if it cannot be used as it is.
    """

    def __init__(self, run: str, incarnation: int, url: str, options: QueueOptions, *, since: int = 0) -> None:
        self.endpoint = masked(url)
        self._run = run
        self._incarnation = incarnation
        self._options = options
        self._since = since
        self._ends = QueueEnds(run, options, self._wait_for_room, self.wait_for)
        self._failure: Exception | None = None
        self._rung = self._is_waiting = self._closed = False
        self.changed = threading.Condition()
        self._links = RedisLink(url), RedisLink(url)
        self._wakeup = Wakeup()
        self._poll = select.poll()
        self._poll.register(self._wakeup.fileno(), select.POLLIN)
        self._sender = SenderThread(self._links[0], self.changed, run, options.microbatches, options.patience)
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
        """Nothing to do: all workers connect to the server."""

    @property
    def trouble(self) -> Trouble | None:
        """Why messages do not move now, if the server is away or refuses them. For any thread."""
        return self._sender.trouble

    @property
    def forgotten(self) -> int:
        """How many messages of this worker the server had and forgot; they were added again."""
        return sum(writer.forgotten for writer in self._sender.writers)

    def ring(self) -> None:
        """Ends the wait of `take` or `pump`. For any thread, and for signal handlers."""
        self._rung = True
        self._wakeup.ring()

    def pump(self, timeout: float) -> None:
        """The threads serve the queues; this waits for a `ring`. Raises the error that ended one of them."""
        self.check_open()
        if timeout > 0:
            self.wait_for(lambda: None, timeout)

    def flush(self, timeout: float) -> bool:
        """Waits until the server has all that may be sent to it now. False if it has not after `timeout` seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: self._sender.is_settled or self._failure is not None, timeout)

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
        self._links[1].close()  # the receiver thread waits there for an answer
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT)
        self._ends.close()
        self._wakeup.close()

    def check_open(self) -> None:
        """Raises the error that ended a thread, `QueueClosed` after `close`."""
        if self._closed:
            raise QueueClosed(f"the queues of incarnation {self._incarnation} in run {self._run!r} are closed")
        if self._failure is not None:
            raise self._failure

    def wait_for(self, look: Callable[[], _Found | None], timeout: float) -> _Found | None:
        """What `look` finds; None after `timeout` seconds or a `ring`."""
        until = monotonic() + timeout
        self._is_waiting = True
        try:
            while True:
                self.check_open()
                rung, self._rung = self._rung, False
                found = look()
                pause = until - monotonic()
                if found is not None or rung or pause <= 0:
                    return found
                self._poll.poll(max(1, 1000 * pause))
                self._wakeup.silence()
        finally:
            self._is_waiting = False

    def _wake(self) -> None:
        if self._is_waiting:
            self._wakeup.ring()

    def _start(self, name: str, work: Callable[[], None], link: RedisLink) -> threading.Thread:
        thread = threading.Thread(target=self._guard, args=(work, link), name=f"redis {name}", daemon=True)
        thread.start()
        return thread

    def _guard(self, work: Callable[[], None], link: RedisLink) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - it is raised where the queues are used
            with self.changed:
                self._failure = error
                self._sender.closing = self._receiver.closing = True
                self.changed.notify_all()
            self._wake()
        finally:
            link.close()

    def _wait_for_room(self, reason: str, since: float) -> bool:
        """Lets the threads work for a while. False if a `put` that began at `since` has waited long enough."""
        self._options.waiting(reason)
        if monotonic() - since >= self._options.patience:
            return False
        self.changed.wait(ROOM_WAIT)
        self.check_open()
        return True

    def _new_outbound(self, log: Log) -> "RedisOutbound":
        writer = StreamWriter(Sender(log), self._incarnation)
        with self.changed:
            self._sender.writers.append(writer)
            self._receiver.writers.append(writer)
            self.kick()
        return RedisOutbound(self, writer)

    def _new_inbound(self, key: QueueKey, window: int) -> "RedisInbound":
        microbatches, limits = self._options.microbatches, self._options.limits
        receiver = Receiver(key, window)
        reader = StreamReader(self._run, receiver, self._incarnation, microbatches, limits, self._since)
        with self.changed:
            self._sender.readers.append(reader)
            self._receiver.readers.append(reader)
            self.kick()
        return RedisInbound(self, reader, microbatches)


class RedisOutbound:
    """The producer's end."""

    def __init__(self, queues: RedisQueues, writer: StreamWriter) -> None:
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
            return self._writer.sender.depth(monotonic())

    def peek(self, limit: int) -> list[Message]:
        with self._queues.changed:
            return self._writer.log.peek(limit)


class RedisInbound:
    """The consumer's end."""

    def __init__(self, queues: RedisQueues, reader: StreamReader, microbatches: int) -> None:
        self.key = reader.receiver.key
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
            if self._reader.must_announce:
                self._queues.kick()
            return message
