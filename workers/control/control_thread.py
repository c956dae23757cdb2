"""A worker's connection to the broker: a thread that sends reports and receives commands.

    compute loop  --Progress-->  ControlThread  --Report (every BEAT seconds)-->  broker
    compute loop  <--commands--  ControlThread  <--Peers, Trim, Stop, ...-------  broker

The compute loop never waits for it. A broker that is away costs nothing: finished steps are kept, and sent again until
the broker has confirmed them.
"""

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import structlog

from stageline.broker.control.channel import ClientChannel
from stageline.broker.control.leaves import Leave
from stageline.broker.control.messages import (
    LONGEST_TEXT,
    WAITS,
    Assigned,
    Failed,
    Finished,
    FromBroker,
    Goodbye,
    Hello,
    Peers,
    Refused,
    Report,
    Standby,
    Stop,
)
from stageline.broker.control.peek import Look, Peeked
from stageline.broker.control.protocol import MessageSeal, Sealer, decode_from_broker
from stageline.broker.errors import BadMessage
from stageline.broker.keys.admission import KeyRefusal
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.transports.base import open_client
from stageline.pipeline.addresses import dialled, host_of, masked
from stageline.pipeline.errors import ExitCode, failure_code
from stageline.pipeline.process.lifeline import Lifeline
from stageline.pipeline.process.steady_clock import STEADY
from stageline.workers.runtime.loop import Clock
from stageline.workers.runtime.progress import Progress

from .alive import NO_PULSE, Pulse
from .client import BrokerUnreachable, KeyRefused
from .joining import JOIN, Joining, OwnStop, Stopped, WorkerIdentity, WorkersMissing
from .leaving import Notice
from .party_trust import PartiesDiffer, PartyTrust
from .refusals import REDIAL, RedialledChannel, explained
from .session import BEAT, UNANSWERED, Reporter, Session
from .views import NOTHING, Views
from .vitals import resident_memory

log = structlog.get_logger()

IGNORED = 12.0  # seconds that the compute loop gets to exit when the broker says so; finishing a step takes part of it
REVOKED = 12.0  # seconds that a broker refuses the key of a worker which had been admitted, before the worker ends
LIFELINE = 1.0  # seconds between two looks at the lifeline
CLOSING = 2.0  # seconds that the thread gets to send what is left


def start_thread(target: Callable[[], None]) -> threading.Thread:
    """Start and return a daemon thread that runs `target`."""
    thread = threading.Thread(target=target, name="control", daemon=True)
    thread.start()
    return thread


class ControlThread:
    """A worker's connection to the broker, with a thread that reports on the compute loop and receives its commands.

    Call `join` first, then `start`. The thread owns the channel and fills `commands`.
    """

    def __init__(
        self,
        url: str,
        identity: WorkerIdentity,
        pair: KeyPair | None = None,
        *,
        trust: PartyTrust | None = None,
        pulse: Pulse = NO_PULSE,
        lifeline: Lifeline | None = None,
        open_channel: Callable[[str, KeyPair | None], ClientChannel] = open_client,
        clock: Clock = STEADY,
        spawn: Callable[[Callable[[], None]], threading.Thread] = start_thread,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        """Open the channel to the broker.

        Args:
            url: The broker's address.
            identity: The worker's identity, for its Hellos.
            pair: Pair by which the broker knows this process; None for an address without a key.
            trust: Judge of what the broker tells about the other workers; None believes all.
            pulse: Signs of life of this process, for what watches it.
            lifeline: This process exits once the lifeline is cut; None for one that is never cut.
            open_channel: Opens the channel; a simulated process passes its own, as with the next three.
            clock: Source of time, in seconds.
            spawn: Starts the thread.
            exit_process: Ends the process with an exit code.
        """
        self.commands: deque[FromBroker | Stopped] = deque()
        self.notice = Notice(clock.monotonic)
        self._wake: Callable[[], None] = lambda: None
        self._lifeline = lifeline or Lifeline()
        self._identity = identity
        self._url = url
        self._pair = pair
        self._trust = trust
        self._pulse = pulse
        self._channel = RedialledChannel(lambda: open_channel(url, pair), clock.monotonic)
        self._clock = clock
        self._sealer = Sealer(clock.time)
        self._spawn = spawn
        self._exit_process = exit_process
        self._outbox: deque[Failed | Finished | Goodbye] = deque()
        self.ignored: Counter[str] = Counter()  # messages that were not the broker's, by kind
        self._closing = False
        self._told_refusal = KeyRefusal.NONE  # last
        self._thread: threading.Thread | None = None
        self._session: Session | None = None
        self._views = NOTHING
        self._dismissed: tuple[float, Stop | Refused] | None = None  # when the broker first ended this worker's work

    def join(self, timeout: float, *, workers_timeout: float = float("inf")) -> Assigned:
        """Return the broker's assignment; stand by for it as long as the broker says so.

        Args:
            timeout: Seconds without an answer after which the broker counts as unreachable.
            workers_timeout: Seconds that a resumed run may lack other workers.

        Raises:
            BrokerUnreachable: No broker answered for `timeout` seconds.
            KeyRefused: What is at the address takes no connection with this process's keys, or the broker has not
                admitted them within `timeout` seconds.
            Stopped: The broker refuses this worker or ends the run, other workers are missing for too long, or the
                lifeline is cut, or the plan here has other parties.
        """
        now = self._clock.monotonic
        joining, begun, deadline, reason = Joining(self._identity), now(), now() + timeout, ""
        while now() < deadline:
            self._pulse.stand_by()
            self._demand_lifeline()
            self._demand_admission()
            self._send(joining.hello())
            for message in self._messages(min(deadline, now() + JOIN), lambda: joining.urgent):
                assigned = joining.receive(message)
                if assigned is not None:
                    # It may take longer than a lease until this worker has loaded what it needs and reports regularly.
                    doing, since = f"{WAITS} for its queues and its model", self._clock.time()
                    self._send(Report(assigned.incarnation, 0, doing, since=since, idle=1.0))
                    return assigned
                if isinstance(message, Standby):
                    deadline = now() + timeout
                    if message.reason != reason:
                        reason = message.reason
                        log.info("standing by", reason=reason)
                    if message.step and now() - begun > workers_timeout:
                        raise WorkersMissing(f"{message.reason}, and no worker came within {workers_timeout:g} s")
        if refusal := self._channel.refusal:
            raise KeyRefused(refusal, self._url, self._pair)
        if self._channel.trouble:
            raise BrokerUnreachable(f"no broker can be reached within {timeout:g} s: {self._channel.trouble}")
        raise BrokerUnreachable(
            f"no broker answered at {masked(self._url)} within {timeout:g} s. "
            f"Start one with `stageline broker`, or name another with --broker."
        )

    def start(
        self,
        assigned: Assigned,
        endpoint: str,
        progress: Progress,
        *,
        steps: int | None,
        wake: Callable[[], None],
        where: Callable[[int], str] = lambda stage: "",
        views: Views = NOTHING,
    ) -> None:
        """Begin to report on `progress` from a thread.

        Args:
            assigned: This process's place.
            endpoint: The address of its queues.
            progress: The progress of its loop, or of a script.
            steps: The number of steps to train; None if a script decides as it goes.
            wake: Makes the loop look at `commands`, even while it waits.
            where: Returns a stage's place in the model, such as "layer 3".
            views: Views of this process that the broker may ask for; by default none.
        """
        self._views = views
        now, clock = self._clock.monotonic(), self._clock.time
        reporter = Reporter(progress, assigned.incarnation, steps, clock, where, resident_memory(), self.notice.tell)
        session = Session(self._identity, assigned, endpoint, reporter, self._outbox, now=now)
        self._session, self._wake = session, wake
        self._thread = self._spawn(lambda: self._serve(session))

    def command(self, command: FromBroker | Stopped) -> None:
        """Hand a command to the compute loop. Safe in any thread and in signal handlers."""
        self.commands.append(command)
        self._wake()

    def leave(self, seconds: float, reason: str) -> None:
        """Have this worker leave the run within `seconds`, for `reason`. Safe in any thread and in signal handlers."""
        self.notice.give(seconds, reason)
        self._wake()

    @property
    def silence(self) -> float:
        """Seconds since the broker's last message, 0.0 before `start`. A broker that is there confirms every report."""
        return 0.0 if self._session is None else self._clock.monotonic() - self._session.last_received

    def send(self, message: Failed | Finished | Goodbye) -> None:
        """Queue `message` to be sent before the next report, in order, or with `close` if the thread has not started.

        `Finished` is repeated until the broker stops the run. The reason of any other message is cut to LONGEST_TEXT
        characters, since it may be the text of a user's exception.
        """
        if not isinstance(message, Finished):  # it may be the text of a user's exception
            message = msgspec.structs.replace(message, reason=message.reason[:LONGEST_TEXT])
        self._outbox.append(message)

    def wait_until_confirmed(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until the broker has confirmed all finished steps and snapshots."""
        deadline = self._clock.monotonic() + timeout
        while self._session and not self._session.reporter.all_confirmed and self._clock.monotonic() < deadline:
            self._clock.sleep(BEAT / 4)

    def close(self) -> None:
        """Send what is left, and close the channel; a worker that has left on notice says goodbye last.

        Waits CLOSING seconds at most for the thread, and half a second for the channel.
        """
        if self.notice.left:
            self.send(Goodbye(0, self.notice.reason))
        self._closing = True
        if self._thread is not None:
            self._thread.join(CLOSING)
        else:
            while self._outbox:
                self._send(self._outbox.popleft())
        self._channel.close()

    def _serve(self, session: Session) -> None:
        try:
            self._exchange(session)
        except Exception as error:  # the compute loop must not go on without commands, whatever it was
            log.exception("the connection to the broker failed")
            self.command(OwnStop(f"the connection to the broker failed: {type(error).__name__}: {error}", 1))

    def _exchange(self, session: Session) -> None:
        looked = float("-inf")
        while not self._closing:
            now = self._clock.monotonic()
            self._pulse.beat(session.reporter.progress)
            if now - looked >= LIFELINE:
                looked = now
                self._look_at_lifeline()
            renewed = self._channel.renewed()
            if renewed:
                session.reconnected()
            if renewed or self.silence > UNANSWERED:
                self._sealer.forget_serials()
            for message in session.due(now):
                self._send(message)
            self._receive_until(now + BEAT, session)
            self._stop_if_revoked()
            self._exit_if_ignored()
            if self.notice.given:
                self._wake()  # it looks whether it may leave
                self._exit_if_late(session)
        for message in session.unsent():
            self._send(message)

    def _look_at_lifeline(self) -> None:
        try:
            self._demand_lifeline()
        except Stopped as stop:
            self._lifeline = Lifeline()  # once is enough
            self.command(stop)

    def _demand_lifeline(self) -> None:
        if self._lifeline.cut:
            raise Stopped(self._lifeline.reason, ExitCode.FAILED, broker_knows=not self._lifeline.ends_run)

    def _demand_admission(self) -> None:
        """Raise `KeyRefused` if there can be no connection; of a key that may be admitted later, log that once."""
        refusal = self._channel.refusal
        if refusal and not refusal.may_pass:
            raise KeyRefused(refusal, self._url, self._pair)
        if refusal and not self._told_refusal:
            log.warning(f"{explained(refusal, self._url, self._pair)}. It is asked again every {REDIAL:g} s")
        self._told_refusal = refusal

    def _stop_if_revoked(self) -> None:
        """End the compute loop once the broker has not admitted this process's key for REVOKED seconds.

        Any other refusal counts as a broker that is away.
        """
        refused_for, refusal = self._channel.refused_for, self._channel.refusal
        if self._dismissed is None and refused_for > REVOKED and refusal.may_pass:
            stop = OwnStop(explained(refusal, self._url, self._pair), ExitCode.NOT_ADMITTED)
            self._dismissed = self._clock.monotonic(), stop
            self.command(stop)

    def _receive_until(self, deadline: float, session: Session) -> None:
        for message in self._messages(deadline, lambda: bool(self._outbox) or self._closing):
            command = session.receive(message, self._clock.monotonic())
            if command is None:
                continue
            if isinstance(command, Look):
                seen = self._views.seen(command)
                self._send(msgspec.structs.replace(seen, incarnation=session.reporter.incarnation))
                continue
            if isinstance(command, Leave):
                self.leave(command.seconds, command.reason)
                continue
            if isinstance(command, Stop | Refused):
                self._dismissed = self._dismissed or (self._clock.monotonic(), command)
            if isinstance(command, Peers):  # an endpoint at all interfaces is on the broker's machine
                host, there = host_of(self._url), command.workers.items()
                command = Peers({index: (number, dialled(endpoint, host)) for index, (number, endpoint) in there})
            self.command(command)

    def _exit_if_ignored(self) -> None:
        """Exit the process if the compute loop has not ended IGNORED seconds after the broker told it to.

        A loop that hangs in the user's code cannot exit by itself. The log says why the process exits.
        """
        if self._dismissed is None or self._clock.monotonic() - self._dismissed[0] < IGNORED:
            return
        command = self._dismissed[1]
        log.error("ended", reason=f"{command.reason}. The compute loop has not ended within {IGNORED:g} s")
        self._exit_process(failure_code(command.code))

    def _exit_if_late(self, session: Session) -> None:
        """Leave at the end of the notice for a compute loop that does not return from an action."""
        if self.notice.late and not self.notice.left:
            log.error("left", reason=self.notice.farewell)
            self._send(Goodbye(session.reporter.incarnation, self.notice.farewell))
            self._channel.close()
            self._exit_process(ExitCode.LEFT)

    def _send(self, message: Hello | Report | Failed | Finished | Goodbye | Peeked) -> None:
        if self._trust is not None and isinstance(message, Hello):
            message = self._trust.introduced(message)
        self._channel.send(self._sealer.worker_message(message))  # it may be lost: all that matters is sent again

    def _messages(self, deadline: float, stop: Callable[[], bool]) -> Iterator[FromBroker]:
        """Yield the broker's messages until `deadline`, in monotonic seconds, or until `stop()` holds.

        Damaged messages, and those that are not the broker's, are skipped: what mattered is sent again, or `join` times
        out.
        """
        while not stop() and (left := deadline - self._clock.monotonic()) > 0:
            if frame := self._channel.receive(left):
                with suppress(BadMessage):
                    message, seal = decode_from_broker(frame)
                    if not self._is_believed(message, seal):
                        continue
                    if isinstance(message, Assigned):
                        self._sealer.learn(message)
                    if (taken := self._taken(message)) is not None:
                        yield taken

    def _taken(self, message: FromBroker) -> FromBroker | None:
        """Return `message` as it is taken; None if it ends this worker. Raises `PartiesDiffer` within `join`."""
        try:
            return message if self._trust is None else self._trust.received(message)
        except PartiesDiffer as error:
            if self._session is None:
                if isinstance(message, Assigned):
                    self.send(Goodbye(message.incarnation, str(error)))
                raise
            self.command(error)
            return None

    def _is_believed(self, message: FromBroker, seal: MessageSeal) -> bool:
        """Return True if `message` is the broker's; log the first of each kind that is not, and count all.

        A process without a place believes every message: nothing can be proven to it yet.
        """
        session = self._session
        if session is None or self._sealer.is_proven(seal) or session.may_hear(message):
            return True
        name = type(message).__name__
        self.ignored[name] += 1
        if self.ignored[name] == 1:
            log.warning(
                "ignored",
                reason=f"{name} that the broker has not sealed for this worker, or that came before: a process between "
                f"the two changes what passes. Others of its kind are counted, and not logged",
            )
        return False
