"""Queues over a Redis server (or Valkey): workers need nothing but a connection to it. `entries.py` has its keys.

    worker 0                                                       worker 1
    put -> Sender ── StreamWriter ── SenderThread ───>  Redis  ──> ReceiverThread ─── StreamReader ── Receiver -> take
                     StreamWriter <─ ReceiverThread            <── SenderThread ───── StreamReader

The computing thread does the work of these two threads as far as it needs no waiting, while it puts and takes messages;
else threads of their own do it: `threads.py`.

The server keeps every message until it is trimmed, and so does its producer, which adds it again if the server forgot.
"""

import select
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from time import monotonic

from stageline.broker.codec.message import Message, fingerprint, read_header
from stageline.broker.control.queue_counts import Depth, Intake
from stageline.broker.errors import QueueClosed
from stageline.broker.queues.base import Trouble
from stageline.broker.queues.delivery import Receiver, Sender
from stageline.broker.queues.ends import Found, QueueEnds, QueueOptions, look_until
from stageline.broker.queues.log import LockedLog, Log
from stageline.broker.queues.secrets import QueueSecrets
from stageline.broker.queues.wakeup import Wakeup
from stageline.pipeline.addresses import masked
from stageline.pipeline.program import Queue

from .connection import RedisLink
from .entries import StepDigests, layout, prefix
from .forms import EntryForm, form_of
from .sender_thread import SenderThread
from .stream_reader import StreamReader
from .stream_writer import StreamWriter
from .threads import ReceiverThread, SharedEnds

LINGER = 1.0  # seconds that closing waits for what is on its way out
JOIN_TIMEOUT = 2.0  # seconds that closing waits for the threads


def forget(url: str, run: str) -> None:
    """Remove the queues of `run` from the server at `url`. The broker's records stay, if they are there too.

    Raises `RedisAway`, `RedisRefusal` and `RedisUnfit`.
    """
    pattern = "".join(f"\\{sign}" if sign in "*?[]^\\" else sign for sign in prefix(run)).encode() + b"*"
    records = f"{prefix(run)}store:".encode()
    found: set[bytes] = set()
    cursor = b""
    with closing(RedisLink(url)) as link:
        while cursor != b"0":
            cursor, keys = link.ask(b"SCAN", cursor or b"0", b"MATCH", pattern, b"COUNT", b"1000")
            found.update(keys)
        if own := [key for key in found if not key.startswith(records)]:
            link.ask(b"UNLINK", *own)


class RedisQueues(QueueEnds):
    """All queue ends of one worker, over the server at `url`: `redis://`, `rediss://` (TLS) or `unix://`.

    A server that cannot be reached is waited for, at the start for the options' `patience`, later without end;
    `trouble` says so. Messages that producers of the incarnation `since` or an older one have left are ignored, and
    replaced.

    Only the thread that made the object may use it, except for `ring`. Its methods raise `RedisAway` if the server
    never came, `RedisUnfit` if it cannot be used as it is.
    """

    def __init__(self, run: str, incarnation: int, url: str, options: QueueOptions, *, since: int = 0) -> None:
        """Start the two threads, which connect to the server.

        Args:
            run: Id of the run.
            incarnation: Incarnation of the worker.
            url: Address of the server.
            options: Windows, limits and patience.
            since: Newest incarnation of an ended life of the run.

        Raises:
            RedisUnfit: `url` cannot be understood.
        """
        super().__init__(run, incarnation, options)
        self.endpoint = masked(url)
        self._since = since
        self._rung = self._is_waiting = self._closed = False
        self._shared = SharedEnds()
        self.lock = self._shared.lock
        links = RedisLink(url), RedisLink(url)
        self._wakeup = Wakeup()
        layout_entry = layout(run, is_sealed=options.secrets.sealing_of is not None)
        self._sender = SenderThread(links[0], self._shared, self._wake, layout_entry, options.patience)
        self.kick = self._sender.kick
        self._receiver = ReceiverThread(links[1], self._shared, self._wake, self.kick, options.patience)
        self.ask_ahead = self._receiver.ask_ahead
        self._sender.start()
        self._receiver.start()

    def connect(self, peers: Mapping[Queue, str]) -> None:
        """Do nothing: all workers connect to the server."""

    def admit(self, newest: int) -> None:
        """Do nothing: no worker requests anything of another."""

    def rekey(self, secrets: QueueSecrets) -> None:
        """Seal with other secrets from now on, as `WorkerQueues.rekey`: what lies at the server is put there again."""
        with self.lock:
            self.options = replace(self.options, secrets=secrets)
            for writer in self._shared.writers:
                writer.seal_with(self._form(writer.log.queue))
            for reader in self._shared.readers:
                reader.seal_with(self._form(reader.receiver.queue))
            self.kick()

    @property
    def trouble(self) -> Trouble | None:
        """Reason for which messages do not move, if the server is away or refuses. Safe to read from any thread."""
        return self._sender.trouble or self._receiver.trouble

    @property
    def forgotten(self) -> int:
        """Number of messages of this worker that were added to the server again, because it had forgotten some."""
        return sum(writer.forgotten for writer in self._shared.writers)

    def ring(self) -> None:
        """End the wait of `take` or `pump`. Safe to call from any thread and from a signal handler."""
        self._rung = True
        self._wakeup.ring()

    def pump(self, timeout: float) -> None:
        """Serve the queues until a `ring` or the end of `timeout` seconds. Raises as `check_open` does."""
        self.check_open()
        if timeout > 0:
            self.wait_for(lambda: None, timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until the server has all that may be sent to it now. Returns False if `timeout` seconds were too few."""
        return self._sender.flush(timeout)

    def close(self) -> None:
        """Close the queues, after a second at most for what is on its way out."""
        if self._closed:
            return
        if self._sender.trouble is None:
            self.flush(LINGER)
        self._closed = True
        self._shared.close()
        self._receiver.link.interrupt()  # the thread waits there for an answer, and closes it
        self._sender.join(JOIN_TIMEOUT)
        self._receiver.join(JOIN_TIMEOUT)
        super().close()
        self._wakeup.close()

    def check_open(self) -> None:
        """Raise the error that ended a thread, `QueueClosed` after `close`."""
        if self._closed:
            raise QueueClosed(f"the queues of incarnation {self.incarnation} in run {self.run!r} are closed")
        if self._shared.failure is not None:
            raise self._shared.failure

    def take(self, look: Callable[[], Message | None], timeout: float) -> Message | None:
        """Return the message that `look` finds; None after `timeout` seconds or a `ring`.

        Looks for the message again and again for a while, and then waits for it asleep.
        """
        began, seconds = monotonic(), self._looking.seconds()
        message = self._wait(look, began + timeout, began + seconds)
        self._looking.ended(seconds, None if message is None else monotonic() - began)
        return message

    def wait_for(self, look: Callable[[], Found | None], timeout: float) -> Found | None:
        """Return what `look` finds; None after `timeout` seconds or a `ring`. Serves the queues until then."""
        return self._wait(look, monotonic() + timeout, 0.0)

    def _wait(self, look: Callable[[], Found | None], until: float, awake: float) -> Found | None:
        """Return what `look` finds; None at the time `until` or after a `ring`.

        Until the time `awake` this thread does not sleep, unless one of the others has the lead, which it would keep
        from running.
        """
        leads = False  # this thread reads what the server sends
        settles = True  # and what it answers to what was put
        try:
            while True:
                self._is_waiting = True
                self.check_open()
                rung, self._rung = self._rung, False
                found = look()
                if found is not None or rung or monotonic() >= until:
                    return found
                leads = self._receiver.ask(leads=leads)
                settles = settles and self._sender.awaits_answer
                arriving = self._receiver.link.fd if leads else None
                answering = self._sender.link.fd if settles else None
                ready = self._poll(until, awake if leads else 0.0, arriving, answering)
                if arriving in ready:
                    self._is_waiting = False
                    leads = self._receiver.receive()
                elif answering in ready:
                    settles = self._sender.settle()
        finally:
            self._is_waiting = False
            if leads:
                self._receiver.lead.release()

    def _poll(self, until: float, awake: float, *descriptors: int | None) -> list[int | None]:
        """Wait until one of the descriptors is readable, for a `ring`, or until the time `until`.

        Sleeps from the time `awake` on. Returns the descriptors that are readable.
        """
        poll = select.poll()
        poll.register(self._wakeup.fd, select.POLLIN)
        for fd in descriptors:
            if fd is not None:
                poll.register(fd, select.POLLIN)
        found = look_until(awake, lambda: poll.poll(0) or None) or poll.poll(max(1, 1000 * (until - monotonic())))
        ready: list[int | None] = [fd for fd, _ in found]
        if self._wakeup.fd in ready:
            self._wakeup.silence()
        return ready

    def _wake(self) -> None:
        if self._is_waiting:
            self._wakeup.ring()

    def _serve(self, seconds: float) -> None:
        with self.lock:  # a `put` to the server holds it already, one into a local queue does not
            self._shared.changed.wait(seconds)
        self.check_open()

    def _new_outbound(self, log: Log) -> "RedisOutbound":
        writer = StreamWriter(Sender(log), self.incarnation, self._since, self._form(log.queue))
        with self.lock:
            self._shared.writers.append(writer)
            self.kick()
        return RedisOutbound(self, writer)

    def _new_inbound(self, receiver: Receiver) -> "RedisInbound":
        form = self._form(receiver.queue)
        reader = StreamReader(self.run, receiver, self.incarnation, self.digests, self._since, form)
        with self.lock:
            self._shared.readers.append(reader)
            self.kick()
        return RedisInbound(self, reader)

    def _form(self, queue: Queue) -> EntryForm:
        return form_of(self.run, queue, self.options.secrets.sealing_of, is_padded=self.options.is_padded)


class RedisOutbound(LockedLog):
    """Producer's end. On the server, the content of an emptied message stays until it is trimmed."""

    def __init__(self, queues: RedisQueues, writer: StreamWriter) -> None:
        """Make the end over `writer`, which a thread of `queues` serves."""
        super().__init__(writer.log, queues.lock)
        self._queues = queues
        self._writer = writer
        self._digests = StepDigests(self.queue, queues.digests, lambda: writer.form)

    def put(self, message: Message) -> None:
        """Retain `message`, and have it sent once the consumer has granted it, as `Outbound.put`."""
        self._queues.check_open()
        with self._queues.lock:
            if frames := self._writer.log.put(message, monotonic()):
                header = read_header(frames[0])
                self._digests.add(self._writer.log.end - 1, fingerprint(header))
            self._queues.kick()
        self._queues.ask_ahead()

    def has_credit(self, number: int, timeout: float) -> bool:
        """Return True if the consumer has granted message `number`; wait up to `timeout` seconds for that."""
        self._queues.check_open()
        return bool(self._queues.wait_for(lambda: number < self._writer.sender.limit or None, timeout))

    def depth(self) -> Depth:
        """Return the queue's content and positions for inspection."""
        with self._queues.lock:
            return self._writer.sender.depth(monotonic())


class RedisInbound:
    """Consumer's end of a queue."""

    def __init__(self, queues: RedisQueues, reader: StreamReader) -> None:
        """Make the end over `reader`, which a thread of `queues` serves."""
        self.queue = reader.receiver.queue
        self._queues = queues
        self._reader = reader

    def take(self, timeout: float) -> Message | None:
        """Return the next message in order, or None after `timeout` seconds or a `ring`, as `Inbound.take`."""
        self._queues.check_open()
        message = self._look()
        return message if message is not None or timeout <= 0 else self._queues.take(self._look, timeout)

    def rewind(self, step: int) -> None:
        """Deliver again from the first message of `step` on."""
        with self._queues.lock:
            self._reader.rewind(step)
            self._queues.kick()

    def intake(self) -> Intake:
        """Return the positions of this end for inspection."""
        with self._queues.lock:
            return self._reader.receiver.intake()

    def _look(self) -> Message | None:
        with self._queues.lock:
            message = self._reader.pop()
            if self._reader.receiver.must_report and self._reader.receiver.ready:  # else when it is asked for more
                self._queues.kick()
            return message
