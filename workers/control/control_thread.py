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
from time import monotonic, sleep, time

import structlog

from stageline.broker.control.open import open_client
from stageline.broker.control.protocol import (
    Assigned,
    Failed,
    Finished,
    FromBroker,
    Goodbye,
    Refused,
    Standby,
    Stop,
    ToBroker,
    decode_from_broker,
    encode,
)
from stageline.broker.errors import BadMessage
from stageline.pipeline.exit_code import ExitCode
from stageline.pipeline.plan.passwords import masked
from stageline.workers.runtime.progress import Progress

from .client import BrokerUnreachable
from .session import BEAT, JOIN, Joining, Session, TurnedAway, WorkerIdentity, acknowledgement

log = structlog.get_logger()

IGNORED = 12.0  # seconds that the compute loop gets to leave when the broker says so; finishing a step takes part of it


class ControlThread:
    """`join` first; then `start`, whose thread owns the line and fills `inbox` with the broker's words."""

    def __init__(self, url: str, introduction: WorkerIdentity) -> None:
        self.inbox: deque[FromBroker] = deque()
        self._url = url
        self._introduction = introduction
        self._box = open_client(url)
        self._outbox: deque[Failed | Finished | Goodbye] = deque()
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        self._letters: Session | None = None
        self._told: tuple[float, Stop | Refused] | None = None  # when the broker said first that this worker is to go

    def join(
        self, patience: float, between: Callable[[], None] = lambda: None, *, company: float = float("inf")
    ) -> Assigned:
        """The broker's assignment; stands by for it as long as the broker says so.

        `between` is called about twice a second; what it raises ends the waiting. Raises `BrokerUnreachable` if no
        broker answers for `patience` seconds, `TurnedAway` if it refuses, or ends the run, or if a run that is resumed
        lacks others for `company` seconds.
        """
        alone = monotonic() + company
        joining, reason = Joining(self._introduction), ""
        deadline = monotonic() + patience
        while (now := monotonic()) < deadline:
            between()
            self._send(joining.hello())
            until = min(deadline, now + JOIN)
            while (left := until - monotonic()) > 0 and not joining.urgent:
                sentence = self._receive(left)
                assigned = joining.hear(sentence) if sentence is not None else None
                if assigned is not None:
                    self._send(acknowledgement(assigned, time()))
                    return assigned
                if isinstance(sentence, Standby):
                    deadline = monotonic() + patience
                    if sentence.step and monotonic() > alone:
                        raise TurnedAway(f"{sentence.reason}, and nobody came within {company:g} s", ExitCode.NO_WORKER)
                    if sentence.reason != reason:
                        reason = sentence.reason
                        log.info("standing by", reason=reason)
        if self._box.trouble:
            raise BrokerUnreachable(f"no broker can be reached within {patience:g} s: {self._box.trouble}")
        raise BrokerUnreachable(
            f"no broker answered at {masked(self._url)} within {patience:g} s. "
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
        letters = Session(self._introduction, assigned, endpoint, progress, steps=steps, now=monotonic())
        self._letters = letters
        self._thread = threading.Thread(target=self._serve, args=(letters, ring), name="link", daemon=True)
        self._thread.start()

    @property
    def silence(self) -> float:
        """For how many seconds the broker has said nothing; a broker that is there confirms every report."""
        return 0.0 if self._letters is None else monotonic() - self._letters.heard

    def say(self, sentence: Failed | Finished | Goodbye) -> None:
        """Sent before the next report, in order, or, before `start`, with `close`. `Finished` is repeated until the
        broker stops the run."""
        self._outbox.append(sentence)

    def wait_until_said(self, patience: float) -> None:
        """Waits until the broker has confirmed all finished steps and snapshots, `patience` seconds at most."""
        deadline = monotonic() + patience
        while self._letters is not None and not self._letters.all_confirmed and monotonic() < deadline:
            sleep(BEAT / 4)

    def close(self) -> None:
        """Sends what is left, waiting half a second at most."""
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
        else:
            self._say_the_rest()
        self._box.close()

    def _serve(self, letters: Session, ring: Callable[[], None]) -> None:
        try:
            self._converse(letters, ring)
        except Exception as error:  # the compute loop must not go on deaf, whatever it was
            log.exception("the line to the broker broke")
            self.inbox.append(Stop(f"the line to the broker broke: {type(error).__name__}: {error}", 1))
            ring()

    def _converse(self, letters: Session, ring: Callable[[], None]) -> None:
        while not self._leaving.is_set():
            now = monotonic()
            if self._box.renewed():
                letters.connected()
            self._hand_over(letters)
            for sentence in letters.due(now):
                self._send(sentence)
            self._listen(letters, now + BEAT, ring)
            self._end_if_ignored()
        self._hand_over(letters)
        for sentence in letters.last_words():
            self._send(sentence)

    def _say_the_rest(self) -> None:
        while self._outbox:
            self._send(self._outbox.popleft())

    def _hand_over(self, letters: Session) -> None:
        while self._outbox:
            letters.say(self._outbox.popleft())

    def _listen(self, letters: Session, until: float, ring: Callable[[], None]) -> None:
        """Takes in what comes before `until`."""
        while (left := until - monotonic()) > 0 and not self._outbox and not self._leaving.is_set():
            said = self._receive(left)
            sentence = letters.hear(said, monotonic()) if said is not None else None
            if sentence is None:
                continue
            if isinstance(sentence, Stop | Refused) and self._told is None:
                self._told = monotonic(), sentence
            self.inbox.append(sentence)
            ring()

    def _end_if_ignored(self) -> None:
        """A compute loop that hangs in the user's code cannot leave by itself; the process does, and says why."""
        if self._told is None or monotonic() - self._told[0] < IGNORED:
            return
        sentence = self._told[1]
        log.error("ended", reason=f"{sentence.reason}. The compute loop has not left within {IGNORED:g} s")
        os._exit(sentence.code)

    def _send(self, sentence: ToBroker) -> None:
        self._box.send(encode(sentence))  # nobody may be there at the moment; all that matters is said again

    def _receive(self, timeout: float) -> FromBroker | None:
        words = self._box.receive(timeout)
        try:
            return None if words is None else decode_from_broker(words)
        except BadMessage:  # damaged, or not a broker's: what matters is said again, or `join` runs out of patience
            return None
