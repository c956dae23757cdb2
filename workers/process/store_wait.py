"""What a broker does while its records cannot be written or reached: it says so, and decides nothing.

Queries are answered. Messages that are sent only once are kept for later; all others are repeated by their senders.
Once the run is to stop, it soon gives up: nothing can be saved that its records would tell of.
"""

from collections.abc import Sequence
from contextlib import suppress
from time import monotonic, time

import structlog

from stageline.broker.control.channel import Received, ServerChannel
from stageline.broker.control.messages import Ask, Exited, Failed, Goodbye, StopRun
from stageline.broker.control.protocol import decode_to_broker, encode
from stageline.broker.coordinator.coordinator import QUESTIONS, Coordinator
from stageline.broker.errors import BadMessage
from stageline.broker.stores.base import StoreUnusable
from stageline.pipeline.process.signals import Signals
from stageline.pipeline.retry import TRIED

MOST, LARGEST = 100, 2**16  # messages that are kept, and bytes of one
STOPPING = 2.0  # seconds that the records are waited for once the run is to stop

log = structlog.get_logger()


class StoreWait:
    """Called by the store with the reason, several times a second."""

    def __init__(self, channel: ServerChannel, signals: Signals) -> None:
        self.core: Coordinator | None = None  # who answers queries, once it is made
        self._channel = channel
        self._signals = signals
        self._told = False
        self._kept: list[Received] = []
        self._asked: set[bytes] = set()  # who was answered in this call
        self._ends: float | None = None  # of a run that is to stop: until when it is waited

    def __call__(self, reason: str) -> None:
        """Raises `StoreUnusable` after a signal, and soon after the run was asked to stop: the broker can do nothing
        now but exit."""
        if not self._told:
            log.warning("the broker waits for its records", reason=reason)
        self._told = True
        if self._ends is None and self.core is not None and self.core.is_interrupted:
            self._ends = monotonic() + STOPPING
        if self._signals.count or (self._ends is not None and monotonic() >= self._ends):
            lacking = reason.partition(TRIED)[0]
            raise StoreUnusable(
                f"interrupted while the broker waited for its records: {lacking}. Mend that, and resume the run"
            )
        if self.core is not None:
            self.core.run.fault = reason
            self._asked.clear()
            for sender, frame in self._channel.receive(0.0) or ():
                with suppress(BadMessage):
                    self._take(self.core, sender, frame or b"")

    def over(self) -> Sequence[Received]:
        """To be called when the store has not waited, or no longer does. What came meanwhile, and is to be handled."""
        if self._told and self.core is not None:
            log.info("the broker keeps its records again")
            self._told, self.core.run.fault = False, ""
        kept, self._kept, self._ends = self._kept, [], None
        return kept

    def _take(self, core: Coordinator, sender: bytes, frame: bytes) -> None:
        message, seal = decode_to_broker(frame, core.is_proven)
        match message:
            case Ask() as ask if sender not in self._asked and len(self._asked) < QUESTIONS:
                self._asked.add(sender)
                recipient, answer = core.answer(sender, ask, time())
                self._channel.send([(recipient, encode(answer))])
            case Failed() | Goodbye() if len(self._kept) < MOST and len(frame) <= LARGEST:
                if core.is_proven(message.incarnation, seal):
                    self._kept.append((sender, frame))
            case StopRun() | Exited() if len(self._kept) < MOST and seal.is_of(core.run.keys.of_control):
                self._kept.append((sender, frame))
                if isinstance(message, StopRun) and not message.over:
                    self._ends = self._ends or monotonic() + STOPPING
