"""Evaluated batches: every microbatch runs forward through every stage, and nothing else runs.

    stage 1  --- evaluation-2 --->   stage 2         put by 1F0 of an evaluated batch
    worker 2 --- verdict-0, verdict-1 --->           what follows from a round: the run ends, or rates change

Of a stage with replicas, the first replica runs all microbatches. Evaluation has queues of its own, so that messages of
training keep their numbers: step * microbatches + microbatch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stageline.pipeline.schedule import Action, forward_only

from .operations import FEW, Op, Per, Queue
from .program import OpLists, Program


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Pass for a run that evaluates.

    Attributes:
        is_told: True if the worker of the last stage tells the others what follows from each round.
        by_credit: True if a stage's consumer says how far the stage may be ahead of it. In a script's run, the script
            waits for replies.
    """

    is_told: bool = False
    by_credit: bool = True

    @classmethod
    def of(cls, batches: int, *, is_told: bool = False) -> "tuple[Evaluation, ...]":
        """Return the pass of a run that evaluates by itself; none for a run that does not.

        Args:
            batches: Batches of each round; 0 for a run without rounds.
            is_told: True if all workers need to know what follows from a round.
        """
        return (cls(is_told=is_told),) if batches else ()

    def lower(self, program: Program) -> Program:
        """Return `program` with evaluated batches and, if all are told what follows, queues of verdicts."""
        schedule = program.schedule
        lists: OpLists = tuple(
            tuple(self._op(program, action) for action in actions)
            for actions in forward_only(schedule.placement, schedule.microbatches, schedule.shares).workers
        )
        return replace(program.with_queues(self._queues(program)), evaluated=lists)

    def _op(self, program: Program, action: Action) -> Op:
        takes = (f"evaluation-{action.stage}",) if action.stage else ()
        gives = (f"evaluation-{action.stage + 1}",) if action.stage < program.last else ()
        awaits = gives[0] if gives and self.by_credit else ""
        return Op(action, program.schedule.name_of(action), Per.EVALUATED, takes, gives, awaits)

    def _queues(self, program: Program) -> Iterator[Queue]:
        owner, count = program.schedule.owner, program.schedule.microbatches
        for stage in range(1, program.schedule.stages):
            yield Queue(
                name=f"evaluation-{stage}",
                producer=owner(stage - 1),
                consumer=owner(stage),
                source=stage - 1,
                target=stage,
                per=Per.EVALUATED,
                count=count,
                window=2 * count + 2,  # one batch may wait while the next one is computed
            )
        decides = owner(program.last)
        for worker in range(program.script if self.is_told else 0):
            if worker != decides:
                yield Queue(
                    name=f"verdict-{worker}",
                    producer=decides,
                    consumer=worker,
                    source=program.last,
                    per=Per.ROUND,
                    window=FEW,
                )
