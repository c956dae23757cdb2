"""How a run goes on once it has what leaves its frozen first stages: from step `first` on, these only end their steps.

               worker 0      worker 1                         stage 0 is frozen
    epoch 0    0F0 0F1 0U    1F0 1F1 1B0 1B1 1U               1F0 takes forward-1, and what that brings is kept
    after it   0U            1F0 1F1 1B0 1B1 1U               1F0 takes nothing; 1B1 gives replayed-0, which 0U takes

A worker of such stages alone would end all steps of the run at once, and be far ahead of all others with its snapshots.
So it waits, once a step, until the stage after it has come as far: a message without content says so. Nothing waits for
such a worker; one that has other stages too goes by its list.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain

from stageline.broker.codec.message import Flow
from stageline.broker.queues.base import QueueKey
from stageline.pipeline.schedule import ENDS_MICROBATCH, Action, Kind, Schedule


class CacheUse(StrEnum):
    """What a forward of the first stage that trains has to do with the cache of what it is given."""

    KEPT = "kept"  # what it takes is put there
    REPLAYED = "replayed"  # it takes nothing, and is given the rows that are there


@dataclass(frozen=True)
class Replays:
    """The steps from `first` on, of a schedule of which some first stages are frozen."""

    schedule: Schedule
    first: int

    def program(self, worker: int, steps: range) -> Iterator[tuple[int, Action]]:
        """The actions of `worker` over `steps`, as `Schedule.program` has them, without what is not computed again."""
        if worker not in self._idle:
            every = self.schedule.program(worker, steps)
            return ((step, action) for step, action in every if step < self.first or self._is_left(action))
        before = range(steps.start, min(steps.stop, self.first))
        after = range(max(steps.start, self.first), steps.stop)
        ends = [Action(Kind.UPDATE, stage) for stage in sorted(self.schedule.placement[worker], reverse=True)]
        return chain(self.schedule.program(worker, before), ((step, end) for step in after for end in ends))

    @cached_property
    def queues(self) -> tuple[QueueKey, ...]:
        """Those by which idle workers learn how far the run is."""
        frozen = range(self.schedule.first_trainable)
        return tuple(QueueKey(Flow.REPLAYED, stage) for stage in frozen if self.schedule.owner(stage) in self._idle)

    def use(self, step: int, action: Action) -> CacheUse | None:
        """What `action` does with the cache."""
        if action.kind is not Kind.FORWARD or action.stage != self.schedule.first_trainable:
            return None
        return CacheUse.KEPT if step < self.first else CacheUse.REPLAYED

    def takes(self, action: Action, usual: tuple[QueueKey, ...]) -> tuple[QueueKey, ...]:
        """What `action` takes from in these steps, where its `usual` queues are those."""
        if self.use(self.first, action) is not None:
            return ()
        if action.kind is Kind.UPDATE and (key := QueueKey(Flow.REPLAYED, action.stage)) in self.queues:
            return (key,)
        return usual

    def gives(self, action: Action, usual: QueueKey | None) -> QueueKey | None:
        """What it gives to: the last backward of the first stage that trains has no result, and says that to the stage
        before it; the end of a step there says it further."""
        key = QueueKey(Flow.REPLAYED, action.stage - 1)
        return key if key in self.queues and self._ends(action) else usual

    @cached_property
    def _idle(self) -> frozenset[int]:
        """The workers of which all stages are frozen first ones."""
        first = self.schedule.first_trainable
        return frozenset(worker for worker, stages in enumerate(self.schedule.placement) if max(stages) < first)

    def _is_left(self, action: Action) -> bool:
        return action.stage >= self.schedule.first_trainable or action.kind is Kind.UPDATE

    def _ends(self, action: Action) -> bool:
        if action.stage == self.schedule.first_trainable:
            return action.kind in ENDS_MICROBATCH and action.microbatch == self.schedule.microbatches - 1
        return action.kind is Kind.UPDATE
