"""Memory of a worker's process, and the offset of the broker's clock.

    worker  ──report, sent at a──>  broker          offset = t - (a + b) / 2, wrong by at most (b - a) / 2
            <──confirmed at t─────  received at b   of the last answers, the one with the shortest way counts

So NTP filters its samples (RFC 5905, section 10): a message that waited somewhere says little. An answer that
contradicts the best one, since it can be true of no offset within the bounds of both, tells that a clock was set, or
that another broker answers: the answers before it are forgotten.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from time import monotonic

import psutil

SAMPLES = 64  # newest answers of which the best one counts
UNANSWERED = 16  # newest reports whose answer is awaited
LOOK = 1.0  # seconds between two looks at the memory


class BrokerClock:
    """The offset of the broker's clock from this process's, in seconds."""

    def __init__(self) -> None:
        """Start without a sample."""
        self._sent: OrderedDict[int, float] = OrderedDict()
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)  # half a round trip, offset

    def sent(self, number: int, now: float) -> None:
        """Note that report `number` is sent at `now`, in seconds since the epoch of this process's clock."""
        self._sent[number] = now
        if len(self._sent) > UNANSWERED:
            self._sent.popitem(last=False)

    def answered(self, number: int, at: float, now: float) -> None:
        """Note that report `number` was confirmed.

        Args:
            number: Number of the report.
            at: When the broker confirmed it, by the broker's clock; 0.0 if it did not say.
            now: When the answer came, by this process's clock.
        """
        sent = self._sent.pop(number, None)
        if sent is not None and at and now >= sent:
            self._learn((now - sent) / 2, at - (sent + now) / 2)

    def _learn(self, uncertain: float, offset: float) -> None:
        known = self.offset
        if known is not None and abs(offset - known[0]) > uncertain + known[1]:
            self._samples.clear()
        self._samples.append((uncertain, offset))

    @property
    def offset(self) -> tuple[float, float] | None:
        """Seconds by which the broker's clock is ahead, and how far that may be wrong; None before an answer."""
        if not self._samples:
            return None
        uncertain, ahead = min(self._samples)
        return ahead, uncertain


def resident_memory(clock: Callable[[], float] = monotonic) -> Callable[[], int]:
    """Return a function that returns the bytes of memory that this process takes, read about once a second."""
    process, seen, read_at = psutil.Process(), 0, float("-inf")

    def resident() -> int:
        nonlocal seen, read_at
        if (now := clock()) - read_at >= LOOK:
            seen, read_at = process.memory_info().rss, now
        return seen

    return resident
