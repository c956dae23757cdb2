"""Pace of a worker's queues: messages a second, from the positions in its newest reports."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from stageline.broker.control.messages import Report
from stageline.broker.control.queue_counts import Depth, Intake

LEAST = 1.0  # seconds between two samples
SAMPLES = 6
SHORTEST = 0.5  # seconds that a pace is measured over, at least


class Flowing(StrEnum):
    """Direction in which messages pass an end of a queue."""

    PUT = "put"
    TAKEN = "taken"


class _Sample(NamedTuple):
    at: float
    puts: Mapping[str, Depth]
    takes: Mapping[str, Intake]

    def position(self, name: str, way: Flowing) -> int | None:
        """Return a position of the queue `name`; None if it was not counted."""
        if way is Flowing.PUT:
            return self.puts[name].put if name in self.puts else None
        return self.takes[name].taken if name in self.takes else None


@dataclass(slots=True)
class QueuePace:
    """Samples of the last seconds, each a reference to what a report has: nothing is copied."""

    _samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _newest: _Sample | None = None

    def note(self, report: Report, now: float) -> None:
        """Take in a report that came at `now`, in seconds since the epoch."""
        if not (report.puts or report.takes):
            return
        self._newest = _Sample(now - report.counted, report.puts, report.takes)
        if not self._samples or self._newest.at - self._samples[-1].at >= LEAST:
            self._samples.append(self._newest)

    def rate(self, name: str, way: Flowing) -> float | None:
        """Return how many messages of the queue `name` passed in a second; None if that is not known yet.

        A replacement begins again at its checkpoint: then nothing is known until it has come as far as before.
        """
        if self._newest is None or not self._samples:
            return None
        first, last = self._samples[0], self._newest
        before, after = first.position(name, way), last.position(name, way)
        seconds = last.at - first.at
        if before is None or after is None or after < before or seconds < SHORTEST:
            return None
        return (after - before) / seconds
