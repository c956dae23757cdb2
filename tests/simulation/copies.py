"""Snapshots that workers send each other: parts are texts, and what they stand for is known to all machines."""

import random

from simulation.chain import mixed
from simulation.disk import Disk
from simulation.process import SimulatedProcess
from stageline.broker.control.checkpoints import CopyState
from stageline.pipeline.tree import Tree
from stageline.workers.checkpoint.snapshot import Snapshot

PARTS = 3


class SimulatedParts:
    """The parts of a snapshot that is sent."""

    count = PARTS

    def __init__(self, snapshot: Snapshot, sent: dict[str, Snapshot]) -> None:
        self._text = mixed(snapshot)
        sent[self._text] = snapshot

    def part(self, place: int) -> Tree:
        return f"{self._text} {place}"


class SimulatedDraft:
    """A snapshot that is received: it is on the disk a while after its last part."""

    count = PARTS
    has_room = True

    def __init__(self, snapshot: Snapshot, process: SimulatedProcess, disk: Disk, seconds: float) -> None:
        self.outcome: CopyState | None = None
        self._snapshot = snapshot
        self._process = process
        self._disk = disk
        self._seconds = seconds
        self._taken = 1
        self._discarded = False

    def add(self, part: Tree) -> None:
        self._taken += 1
        if self._taken == PARTS:
            self._process.later(self._seconds, self._finish)

    def discard(self) -> None:
        self._discarded = True

    def _finish(self) -> None:
        if not self._discarded:
            self._disk.write(self._snapshot)
            self.outcome = CopyState.DONE


class SimulatedStore:
    """A `CopyStore`: the snapshots on the disk of one process's machine."""

    def __init__(
        self, process: SimulatedProcess, disk: Disk, sent: dict[str, Snapshot], rng: random.Random, slowness: float
    ) -> None:
        self._process = process
        self._disk = disk
        self._sent = sent
        self._rng = rng
        self._slowness = slowness
        self._newest: dict[int, int] = {}

    def has(self, stage: int, step: int) -> bool:
        return self._disk.is_whole(stage, step)

    def parts(self, stage: int, step: int) -> SimulatedParts | None:
        return SimulatedParts(self._disk.load(stage, step), self._sent) if self.has(stage, step) else None

    def draft(self, stage: int, step: int, first: Tree) -> SimulatedDraft:
        snapshot = self._sent[str(first).partition(" ")[0]]
        assert (snapshot.stage, snapshot.step) == (stage, step)
        return SimulatedDraft(snapshot, self._process, self._disk, self._rng.expovariate(1 / self._slowness))

    def forget(self, stage: int, complete: int, best: int | None) -> None:
        before = self._newest.get(stage, 0)
        if complete > before:
            self._newest[stage] = complete
            self._disk.delete_before(stage, before, best)
