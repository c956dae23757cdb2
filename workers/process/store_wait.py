"""What a broker does while its records cannot be written or reached: it says so, and decides nothing.

Queries are answered. Messages that are sent only once are kept for later; all others are repeated by their senders.
"""

from collections.abc import Sequence
from contextlib import suppress
from time import time

import structlog

from stageline.broker.control.channel import Received, ServerChannel
from stageline.broker.control.messages import Ask, Failed, Goodbye
from stageline.broker.control.protocol import decode_to_broker, encode
from stageline.broker.coordinator.coordinator import QUESTIONS, Coordinator
from stageline.broker.errors import BadMessage
from stageline.broker.stores.base import StoreUnusable

from .signals import Signals

MOST, LARGEST = 100, 2**16  # messages that are kept, and bytes of one

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

    def __call__(self, reason: str) -> None:
        """Raises `StoreUnusable` after a signal: the broker can do nothing now but exit."""
        if not self._told:
            log.warning("the broker waits for its records", reason=reason)
        self._told = True
        if self._signals.count:
            raise StoreUnusable(f"interrupted while the broker waited for its records: {reason}")
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
        kept, self._kept = self._kept, []
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
