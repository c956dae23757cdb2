"""The folder of snapshots and its writer: slow, one at a time. A snapshot is there whole or not at all.

The writer behaves as `BackgroundWriter` does: none is dropped, deletions go first.
"""

import random
from collections.abc import Callable, Collection

from simulation.process import SimulatedProcess, VirtualWakeup
from stageline.broker.control.messages import Assigned
from stageline.broker.control.records import Inspection
from stageline.broker.ledger.recovery import is_gone
from stageline.pipeline.schedule import Placement
from stageline.workers.checkpoint.directory import SnapshotFailed
from stageline.workers.checkpoint.snapshot import Snapshot
from stageline.workers.disk.background_writer import WriteFailed


class Torn(SnapshotFailed):
    """The snapshots are not what they must be."""


class Disk:
    """Disk that one machine sees, or all of them together."""

    folder = "the disk"

    def __init__(self, placement: Placement, name: str = "one disk") -> None:
        self.placement = placement
        self.name = name
        self._kept: dict[tuple[int, int], Snapshot] = {}
        self._damaged: set[tuple[int, int]] = set()

    def damage(self, stage: int, step: int) -> None:
        self._damaged.add((stage, step))

    def is_whole(self, stage: int, step: int) -> bool:
        return (stage, step) in self._kept and (stage, step) not in self._damaged

    def path(self, stage: int, step: int) -> str:
        return f"stage {stage}, step {step}"

    def delete_drafts(self, stage: int) -> None:
        """There are none: a snapshot is written in one instant."""

    def write(self, snapshot: Snapshot) -> None:
        if not self.is_whole(snapshot.stage, snapshot.step):
            self._delete(snapshot.stage, snapshot.step)
        there = self._kept.setdefault((snapshot.stage, snapshot.step), snapshot)
        if (there.state, there.losses, there.rounds) != (snapshot.state, snapshot.losses, snapshot.rounds):
            raise Torn(f"stage {snapshot.stage} came to step {snapshot.step} with other bits than before")
        if there.position != snapshot.position:
            raise Torn(f"step {snapshot.step} is at {snapshot.position}, and was at {there.position} before")

    def load(self, stage: int, step: int) -> Snapshot:
        if not self.is_whole(stage, step):
            raise Torn(f"stage {stage} has no snapshot of step {step} to begin with; there is {self.steps(stage)}")
        return self._kept[stage, step]

    def steps(self, stage: int) -> list[int]:
        return sorted(step for of, step in self._kept if of == stage)

    def whole(self, stage: int) -> set[int]:
        return {step for step in self.steps(stage) if self.is_whole(stage, step)}

    def delete_before(self, stage: int, below: int, best: int | None = None) -> None:
        for step in self.steps(stage):
            if step < below and step != best:
                self._delete(stage, step)

    def abandon(self, stage: int, above: int, since: int) -> None:
        for step in self.steps(stage):
            if step > above and self._kept[stage, step].incarnation <= since:
                self._delete(stage, step)

    def _delete(self, stage: int, step: int) -> None:
        self._kept.pop((stage, step), None)
        self._damaged.discard((stage, step))


class Disks:
    """The disk of each machine: all have one, or each has its own, which may be lost with all that is on it."""

    def __init__(self, placement: Placement, *, apart: bool) -> None:
        self.sent: dict[str, Snapshot] = {}  # what the texts stand for that workers send each other
        self._apart = apart
        self._made = 0
        self._placement = placement
        self._disks: dict[str, Disk] = {}

    def of(self, host: str) -> Disk:
        key = host if self._apart else ""
        if key not in self._disks:
            self._made += 1
            self._disks[key] = Disk(self._placement, f"disk {self._made} of {key}")
        return self._disks[key]

    def lose(self, host: str) -> None:
        self._disks.pop(host, None)

    def all(self) -> list[Disk]:
        return list(self._disks.values())

    def common(self) -> set[int]:
        """The steps of which every stage has a whole snapshot on one of the disks."""
        stages = [stage for stages in self._placement for stage in stages]
        return set.intersection(*({s for d in self.all() for s in d.whole(stage)} for stage in stages))


class SnapshotView:
    """A `SnapshotInventory`: the snapshots of `stages` are what one worker sees."""

    def __init__(self, disk: Disk, stages: Collection[int]) -> None:
        self.placement = disk.placement
        self._disk = disk
        self._stages = stages

    def disk(self, run: str) -> str:
        return self._disk.name

    def snapshots(self, run: str) -> list[tuple[int, int]]:
        return [(stage, step) for stage in sorted(self._stages) for step in self._disk.steps(stage)]

    def can_begin(self, assigned: Assigned) -> bool:
        every = [stage for stages in self.placement for stage in stages]  # a script begins where these are
        return not is_gone(assigned.step, self.placement[assigned.index] or every, self.snapshots(assigned.run))

    def inspect(self, run: str, step: int, claim: int | None) -> Inspection:
        there = [stage for stage, of in self.snapshots(run) if of == step]
        stages = there if claim is None else sorted({*self.placement[claim], *there})
        whole = [stage for stage in stages if self._disk.is_whole(stage, step)]
        return Inspection(step, whole, [f"stage {each}, step {step}" for each in stages if each not in whole])

    def abandon(self, assigned: Assigned) -> None:
        for stage in self._stages:
            self._disk.abandon(stage, assigned.step, assigned.since)


class SimulatedWriter:
    """The `BackgroundWriter` of `process`. Writing takes `slowness` seconds on the average, deleting no time; it never
    fails."""

    def __init__(self, process: SimulatedProcess, rng: random.Random, slowness: float) -> None:
        self._process = process
        self._rng = rng
        self._slowness = slowness
        self._changed = VirtualWakeup(process)
        self._waiting: dict[int | None, Callable[[], None]] = {}
        self._writing: tuple[int | None, Callable[[], None]] | None = None

    def is_done(self, stage: int, timeout: float) -> bool:
        return self._wait_for(lambda: stage not in self._stages_unwritten(), timeout)

    def submit(
        self, job: Callable[[], None], stage: int | None = None, size: int = 0, *, first: bool = False, what: str = ""
    ) -> None:
        if not size:
            job()
            return
        self._waiting[stage] = job
        if self._writing is None:
            self._begin()

    def flush(self, timeout: float) -> bool:
        return self._wait_for(lambda: not self._stages_unwritten(), timeout)

    def demand(self, done: bool, waited: float, failed: type[WriteFailed]) -> None:
        if not done:
            raise failed(f"the disk is still busy after {waited:g} s")

    def close(self, timeout: float) -> None:
        self.flush(timeout)
        self._waiting.clear()

    def _wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        deadline = self._process.monotonic() + timeout
        while not condition() and (left := deadline - self._process.monotonic()) > 0:
            self._changed.wait(left)
        return condition()

    def _stages_unwritten(self) -> set[int | None]:
        return {*self._waiting, *(() if self._writing is None else self._writing[:1])}

    def _begin(self) -> None:
        stage = next(iter(self._waiting), None)
        self._writing = (stage, self._waiting.pop(stage)) if self._waiting else None
        if self._writing is not None:
            self._process.later(self._rng.expovariate(1 / self._slowness), self._end)

    def _end(self) -> None:
        assert self._writing is not None
        self._writing[1]()
        self._begin()
        self._changed.set()
