"""Counts of the queues that one process has an end of, taken by the thread that owns them, for its reports."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from stageline.broker.control.queue_counts import Depth, Intake
from stageline.broker.queues.base import Queues
from stageline.pipeline.program import Queue

Counted = TypeVar("Counted")


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """Counts of the producers' ends and the consumers' ends of one process, by the names of their queues.

    `at` is when they were taken, in seconds since the epoch.
    """

    depths: Mapping[str, Depth] = field(default_factory=dict)
    intakes: Mapping[str, Intake] = field(default_factory=dict)
    at: float = 0.0


class QueueCounter:
    """Counter of the ends that the process of one place has."""

    def __init__(self, queues: Queues, ends: Iterable[Queue], place: int) -> None:
        """Open the ends.

        Args:
            queues: Queues of the process.
            ends: Queues that it has an end of.
            place: Place of the process.
        """
        known = list(ends)
        self._outbounds = {each.name: queues.outbound(each).depth for each in known if each.producer == place}
        self._intakes = {each.name: queues.inbound(each).intake for each in known if each.consumer == place}

    def count(self, now: float) -> QueueCounts:
        """Return the counts at `now`, in seconds since the epoch. For the thread that owns the queues."""
        return QueueCounts(_counted(self._outbounds), _counted(self._intakes), now)


def _counted(ends: Mapping[str, Callable[[], Counted]]) -> dict[str, Counted]:
    return {name: count() for name, count in ends.items()}
