"""A worker's line to the broker: a thread that reports what the compute loop has left in its `Progress`, and listens.

    compute loop  --Progress-->  Link thread  --Report (every BEAT seconds)-->  broker
    compute loop  <---inbox----  Link thread  <--Peers, Trim, Stop, ...-------  broker

The compute loop never waits for it. A broker that is away costs nothing: finished steps are kept and said again until
the broker has confirmed them.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep

import msgspec
import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from broker.control import (
    CONTROL_VERSION,
    Assigned,
    Failed,
    Finished,
    FromBroker,
    Goodbye,
    Heard,
    Hello,
    Refused,
    Stop,
    ToBroker,
    decode_from_broker,
    encode,
)

from .client import BrokerUnreachable
from .progress import Progress
from .reporter import Reporter

log = structlog.get_logger()

IGNORED = 12.0  # seconds that the compute loop gets to leave when the broker says so; finishing a step takes part of it
BEAT = 0.1  # seconds between two reports
AGAIN = 0.25  # seconds after which an unanswered Hello is said again


class TurnedAway(Exception):
    """The broker refuses this worker; `code` is the exit code to leave with."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a worker says of itself: see `broker.control.Hello`."""

    plan: str
    name: str
    host: str
    claim: int | None
    settings: dict[str, object]

    def hello(self, endpoint: str = "", incarnation: int = 0) -> Hello:
        return Hello(
            CONTROL_VERSION,
            self.plan,
            self.name,
            self.host,
            os.getpid(),
            endpoint,
            self.claim,
            incarnation,
            self.settings,
        )


class Link:
    """`join` first; then `start`, whose thread owns the socket and fills `inbox` with the broker's words."""

    def __init__(self, url: str, introduction: Introduction) -> None:
        self.inbox: deque[FromBroker] = deque()
        self._url = url
        self._introduction = introduction
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 500)
        self._socket.set(zmq.SNDHWM, 64)
        self._socket.set(zmq.IMMEDIATE, 1)
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._known = False  # whether the broker that we are connected to has answered our Hello
        self._socket.connect(url)
        self._outbox: deque[ToBroker] = deque()
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        self._heard = monotonic()
        self._reporter: Reporter | None = None
        self._told: tuple[float, Stop | Refused] | None = None  # when the broker said first that this worker is to go

    def join(self, patience: float) -> Assigned:
        """The broker's assignment. Raises `BrokerUnreachable` after `patience` seconds, `TurnedAway` if it refuses."""
        deadline = monotonic() + patience
        while monotonic() < deadline:
            self._send(self._introduction.hello())
            match self._receive(min(0.5, deadline - monotonic())):
                case Assigned() as assigned:
                    return assigned
                case Refused(reason, code):
                    raise TurnedAway(reason, code)
                case _:
                    continue
        raise BrokerUnreachable(
            f"no broker answered at {self._url} within {patience:g} s. "
            f"Start one with `stageline broker`, or name another with --broker."
        )

    def start(
        self,
        assigned: Assigned,
        endpoint: str,
        progress: Progress,
        *,
        steps: int,
        ring: Callable[[], None],
    ) -> None:
        """Begin to report on `progress`. `ring` is called when something has come into the inbox."""
        hello = self._introduction.hello(endpoint, assigned.incarnation)
        reporter = self._reporter = Reporter(progress, assigned.incarnation, steps)
        self._thread = threading.Thread(target=self._serve, args=(hello, reporter, ring), name="link", daemon=True)
        self._thread.start()

    @property
    def silence(self) -> float:
        """For how many seconds the broker has said nothing; a broker that is there confirms every report."""
        return monotonic() - self._heard

    def say(self, sentence: Failed | Finished | Goodbye) -> None:
        """Sent before the next report, in order, or, before `start`, with `close`. `Finished` is repeated until the
        broker stops the run."""
        self._outbox.append(sentence)

    def wait_until_said(self, patience: float) -> None:
        """Waits until the broker has confirmed all finished steps and snapshots, `patience` seconds at most."""
        deadline = monotonic() + patience
        while self._reporter is not None and not self._reporter.all_confirmed and monotonic() < deadline:
            sleep(BEAT / 4)

    def close(self) -> None:
        """Sends what is left, waiting half a second at most."""
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
        else:
            self._say_the_rest()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def _serve(self, hello: Hello, reporter: Reporter, ring: Callable[[], None]) -> None:
        introduced = -AGAIN
        finished: Finished | None = None
        while not self._leaving.is_set():
            now = monotonic()
            self._note_connections()
            if not self._known and now - introduced >= AGAIN:
                self._send(hello)
                introduced = now
            while self._outbox:
                sentence = self._outbox.popleft()
                if isinstance(sentence, Finished):
                    finished = sentence
                else:
                    self._send(sentence)
            self._send(reporter.report(now))
            if finished is not None and reporter.all_confirmed:
                self._send(finished)
            self._listen(now + BEAT, reporter, ring)
            self._end_if_ignored()
        self._say_the_rest()

    def _say_the_rest(self) -> None:
        while self._outbox:
            self._send(self._outbox.popleft())

    def _listen(self, until: float, reporter: Reporter, ring: Callable[[], None]) -> None:
        """Takes in what comes before `until`."""
        while (left := until - monotonic()) > 0 and not self._outbox and not self._leaving.is_set():
            match self._receive(left):
                case None:
                    continue
                case Heard(number):
                    reporter.confirmed(number)
                case Assigned():
                    self._known = True
                case sentence:
                    if isinstance(sentence, Stop | Refused) and self._told is None:
                        self._told = monotonic(), sentence
                    self.inbox.append(sentence)
                    ring()
            self._heard = monotonic()

    def _end_if_ignored(self) -> None:
        """A compute loop that hangs in the user's code cannot leave by itself; the process does, and says why."""
        if self._told is None or monotonic() - self._told[0] < IGNORED:
            return
        sentence = self._told[1]
        log.error("ended", reason=f"{sentence.reason}. The compute loop has not left within {IGNORED:g} s")
        os._exit(sentence.code)

    def _note_connections(self) -> None:
        """Every connection may be one to another broker, which knows neither us nor where our queues are, and what the
        former one said last may be lost. So we say hello again, and are told who the peers are."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._known = False

    def _send(self, sentence: ToBroker) -> bool:
        try:
            self._socket.send(encode(sentence), zmq.NOBLOCK)
        except zmq.Again:  # nobody there at the moment; all that matters is said again
            return False
        return True

    def _receive(self, timeout: float) -> FromBroker | None:
        if not self._socket.poll(max(0, int(timeout * 1000))):
            return None
        try:
            return decode_from_broker(self._socket.recv())
        except msgspec.MsgspecError:  # of another version, or not a broker's: `join` will run out of patience
            return None
