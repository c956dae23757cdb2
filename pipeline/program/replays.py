"""Steps that replay what leaves the frozen first stages: from step `first` on, these stages only end their steps.

               worker 0      worker 1                         stage 0 is frozen
    epoch 0    0F0 0F1 0U    1F0 1F1 1B0 1B1 1U               1F0 takes forward-1, and its message is kept
    after it   0U            1F0 1F1 1B0 1B1 1U               1F0 takes nothing; 1B1 gives replayed-0, which 0U takes

A worker that has only such stages would end all steps of the run at once, and be far ahead of all others with its
snapshots. So it waits, once a step, until the stage after it has come as far: a message without content says so.
Nothing waits for such a worker; one that has other stages too goes by its list.
"""

from dataclasses import dataclass
from dataclasses import replace as with_changes
from enum import StrEnum

from msgspec.structs import replace

from stageline.pipeline.schedule import ENDS_MICROBATCH, Kind

from .operations import FEW, Op, Per, Queue
from .program import Program, StepLists


class CacheUse(StrEnum):
    """Uses of the cache by a forward of the first stage that trains, for its inputs."""

    KEPT = "kept"  # what it takes is put there
    REPLAYED = "replayed"  # it takes nothing, and is given the rows that are there


@dataclass(frozen=True, slots=True)
class Replays:
    """Pass for a run that keeps the messages of its frozen first stages, and replays them from step `first` on."""

    first: int

    @classmethod
    def of(cls, first: int | None) -> "tuple[Replays, ...]":
        """Return the pass of a run that replays from step `first` on; none for None."""
        return () if first is None else (cls(first),)

    def lower(self, program: Program) -> Program:
        """Return `program` with a section of steps that replay."""
        made = _Replayed(program)
        kept = program.with_lists(lambda worker, ops: tuple(map(made.kept, ops)))
        section = StepLists(self.first, tuple(map(made.ops, range(program.script), program.step)))
        kept = kept.requeued(lambda queue: replace(queue, ends=self.first) if made.is_replaced(queue) else queue)
        kept = with_changes(kept, sections=(*kept.sections, section))
        return kept.with_queues(made.queue(stage, self.first) for stage in made.told)


class _Replayed:
    """Maker of the steps that replay."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._first = program.schedule.first_trainable  # the stage that is given what was kept
        self._idle = {worker for worker, stages in enumerate(program.schedule.placement) if max(stages) < self._first}
        owner = program.schedule.owner
        self.told = [stage for stage in range(self._first) if owner(stage) in self._idle]

    def kept(self, op: Op) -> Op:
        """Return `op` of a step before the replays, marked to keep its inputs if the first trainable stage runs it."""
        return replace(op, marks=(*op.marks, CacheUse.KEPT)) if self._is_given(op) else op

    def ops(self, worker: int, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        """Return the operations of `worker` in a step that replays, given those of a step that does not."""
        left = [op for op in ops if op.action.stage >= self._first or op.action.kind == Kind.UPDATE]
        if worker in self._idle:
            left.sort(key=lambda op: -op.action.stage)
        ends = [op for op in ops if op.action.stage == self._first and op.action.kind in ENDS_MICROBATCH][-1:]
        return tuple(self._replayed(op, tells=op in ends) for op in left)

    def is_replaced(self, queue: Queue) -> bool:
        """Return True if replayed rows take the place of the messages of `queue`."""
        return queue.flow == "forward" and queue.target is not None and queue.target <= self._first

    def queue(self, stage: int, begins: int) -> Queue:
        """Return the queue by which `stage` waits, from step `begins` on, for the stage after it."""
        owner = self._program.schedule.owner
        return Queue(
            name=f"replayed-{stage}",
            producer=owner(stage + 1),
            consumer=owner(stage),
            source=stage + 1,
            target=stage,
            per=Per.STEP,
            window=FEW,
            begins=begins,
            signals=True,
        )

    def _is_given(self, op: Op) -> bool:
        return op.action.kind == Kind.FORWARD and op.action.stage == self._first

    def _replayed(self, op: Op, *, tells: bool) -> Op:
        stage, before = op.action.stage, op.action.stage - 1
        if self._is_given(op):
            return replace(op, takes=(), marks=(*op.marks, CacheUse.REPLAYED))
        if op.action.kind == Kind.UPDATE and stage in self.told:
            op = replace(op, takes=(f"replayed-{stage}",))
        if before in self.told and (tells if stage == self._first else op.action.kind == Kind.UPDATE):
            op = replace(op, gives=(f"replayed-{before}",))
        return op
