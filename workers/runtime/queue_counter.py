"""Counts of the queues that one process has an end of, taken by the thread that owns them, for its reports.

Positions in a queue that carries copies of snapshots are those in the present transfer.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from stageline.broker.control.queue_counts import Depth, Intake
from stageline.broker.queues.base import Queues
from stageline.pipeline.program import CHUNKS, Queue

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
        self._copies = {each.name for each in known if each.copies}
        self._outbounds = {each.name: queues.outbound(each).depth for each in known if each.producer == place}
        self._intakes = {each.name: queues.inbound(each).intake for each in known if each.consumer == place}

    def count(self, now: float) -> QueueCounts:
        """Return the counts at `now`, in seconds since the epoch. For the thread that owns the queues."""
        depths, intakes = _counted(self._outbounds), _counted(self._intakes)
        if not self._copies:
            return QueueCounts(depths, intakes, now)
        puts = {name: _within_transfer(depth) if name in self._copies else depth for name, depth in depths.items()}
        takes = {name: _of_transfer(intake) if name in self._copies else intake for name, intake in intakes.items()}
        return QueueCounts(puts, takes, now)


def _counted(ends: Mapping[str, Callable[[], Counted]]) -> dict[str, Counted]:
    return {name: count() for name, count in ends.items()}


def _within_transfer(depth: Depth) -> Depth:
    first = depth.put - depth.put % CHUNKS
    return replace(
        depth,
        put=depth.put - first,
        sent=max(0, depth.sent - first),
        arrived=max(0, depth.arrived - first),
        granted=None if depth.granted is None else max(0, depth.granted - first),
        resends=(),
    )


def _of_transfer(intake: Intake) -> Intake:
    first = intake.received - intake.received % CHUNKS
    granted = None if intake.granted is None else max(0, intake.granted - first)
    return replace(intake, received=intake.received - first, taken=max(0, intake.taken - first), granted=granted)
