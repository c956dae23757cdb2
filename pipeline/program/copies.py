"""Queues that carry copies of snapshots between workers, so that a disk may be lost.

    worker 0  --- copies-0-1 --->  worker 1      snapshots of worker 0 to be held by worker 1, and those that worker 1
    worker 0  <-- copies-1-0 ----  worker 1      has lost, back; the other way likewise

The workers of a group form a ring. Snapshots of each go to the next one, or to the one opposite or before it if those
have its disk: the broker chooses. No copy leaves its group.

A message is a chunk of a snapshot, and belongs to no step: the broker numbers the transfers of a run, and each has
`CHUNKS` numbers for its chunks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .operations import Per, Queue
from .program import Program

CHUNKS = 2**10  # messages of a transfer at most
WINDOW = 8  # chunks on their way

Neighbours = tuple[tuple[int, ...], ...]


def neighbours_of(workers: int, groups: Sequence[Sequence[int]]) -> Neighbours:
    """Return the workers that may hold a copy of each worker's snapshots, by preference, and it a copy of theirs.

    Args:
        workers: Number of workers.
        groups: Indexes of workers among which copies may go. A worker of none has no copy.
    """
    found: list[tuple[int, ...]] = [()] * workers
    for group in groups:
        ring = sorted(group)
        for at, worker in enumerate(ring):
            half = len(ring) // 2
            others = dict.fromkeys(ring[(at + each) % len(ring)] for each in (1, half, -half, -1))
            found[worker] = tuple(other for other in others if other != worker)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SnapshotCopies:
    """Pass for a run whose snapshots are copied.

    Attributes:
        neighbours: Workers that may hold a copy of each worker's snapshots.
    """

    neighbours: Neighbours

    def lower(self, program: Program) -> Program:
        """Return `program` with the queues that carry copies."""
        return program.with_queues(self._queues())

    def _queues(self) -> Iterator[Queue]:
        for one, others in enumerate(self.neighbours):
            for other in others:
                yield Queue(name=f"copies-{one}-{other}", producer=one, consumer=other, per=Per.CHUNK, window=WINDOW)
