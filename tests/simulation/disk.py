"""The folder of snapshots and its writer: slow, one at a time. A snapshot is there whole or not at all.

The writer behaves as `checkpoint.writer` does: none is dropped, one of each stage may wait, deletions go first.
"""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from simulation.chain import State
from simulation.process import Process
from stageline.broker.control.protocol import Assigned, Inspection
from stageline.broker.recovery.checkpoint_tracker import is_gone
from stageline.pipeline.schedule import Placement


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One stage after `step` steps, with the losses before, on the last stage."""

    stage: int
    step: int
    state: State
    losses: tuple[tuple[int, float], ...] = ()


class Torn(Exception):
    """The snapshots are not what they must be."""


class Disk:
    """What all machines see together."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._kept: dict[tuple[int, int], Snapshot] = {}
        self._damaged: set[tuple[int, int]] = set()

    def damage(self, stage: int, step: int) -> None:
        self._damaged.add((stage, step))

    def is_whole(self, stage: int, step: int) -> bool:
        return (stage, step) in self._kept and (stage, step) not in self._damaged

    def place(self, snapshot: Snapshot) -> None:
        if not self.is_whole(snapshot.stage, snapshot.step):
            self._delete(snapshot.stage, snapshot.step)
        there = self._kept.setdefault((snapshot.stage, snapshot.step), snapshot)
        if there != snapshot:
            raise Torn(f"stage {snapshot.stage} came to step {snapshot.step} with other bits than before")

    def load(self, stage: int, step: int) -> Snapshot:
        if not self.is_whole(stage, step):
            raise Torn(f"stage {stage} has no snapshot of step {step} to begin with; there is {self.steps(stage)}")
        return self._kept[stage, step]

    def steps(self, stage: int) -> list[int]:
        return sorted(step for of, step in self._kept if of == stage)

    def common(self) -> set[int]:
        """The steps of which all stages have a whole snapshot."""
        stages = [stage for stages in self.placement for stage in stages]
        return set.intersection(*({s for s in self.steps(stage) if self.is_whole(stage, s)} for stage in stages))

    def forget(self, stage: int, below: int) -> None:
        for step in self.steps(stage):
            if step < below:
                self._delete(stage, step)

    def abandon(self, stage: int, above: int) -> None:
        for step in self.steps(stage):
            if step > above:
                self._delete(stage, step)

    def _delete(self, stage: int, step: int) -> None:
        self._kept.pop((stage, step), None)
        self._damaged.discard((stage, step))


class View:
    """What one worker sees: the snapshots of `stages`. See `workers.correspondence.Disk`."""

    def __init__(self, disk: Disk, stages: Collection[int]) -> None:
        self._disk = disk
        self._stages = stages

    def snapshots(self, run: str) -> list[tuple[int, int]]:
        return [(stage, step) for stage in sorted(self._stages) for step in self._disk.steps(stage)]

    def can_begin(self, assigned: Assigned) -> bool:
        return not is_gone(assigned.step, self._disk.placement[assigned.index], self.snapshots(assigned.run))

    def inspect(self, run: str, step: int, claim: int | None) -> Inspection:
        there = [stage for stage, of in self.snapshots(run) if of == step]
        stages = there if claim is None else self._disk.placement[claim]
        whole = [stage for stage in stages if self._disk.is_whole(stage, step)]
        return Inspection(step, whole, [f"stage {each}, step {step}" for each in stages if each not in whole])

    def abandon(self, assigned: Assigned) -> None:
        for stage in self._disk.placement[assigned.index]:
            self._disk.abandon(stage, assigned.step)


class Writer:
    """Writes the snapshots of `process`. Each takes `slowness` seconds on the average."""

    def __init__(
        self,
        process: Process,
        disk: Disk,
        dice: random.Random,
        slowness: float,
        durable: Callable[[int, int], None],
    ) -> None:
        self._process = process
        self._disk = disk
        self._dice = dice
        self._slowness = slowness
        self._durable = durable
        self._waiting: dict[int, Snapshot] = {}
        self._writing: Snapshot | None = None

    @property
    def idle(self) -> bool:
        return not self._waiting and self._writing is None

    def room(self, stage: int) -> bool:
        return stage not in self._waiting

    def keep(self, snapshot: Snapshot) -> None:
        self._waiting[snapshot.stage] = snapshot
        if self._writing is None:
            self._begin()

    def _begin(self) -> None:
        stage = next(iter(self._waiting), None)
        self._writing = None if stage is None else self._waiting.pop(stage)
        if self._writing is not None:
            self._process.later(self._dice.expovariate(1 / self._slowness), self._end)

    def _end(self) -> None:
        assert self._writing is not None
        self._disk.place(self._writing)
        done = self._writing
        self._begin()
        self._durable(done.stage, done.step)
