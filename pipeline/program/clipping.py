"""Gradients clipped by their norm over all stages: norms go down the pipeline, and the total comes up again.

    stage 0  <-- norms-0 --  stage 1  <-- norms-1 --  stage 2      put by 2N and 1N, taken by 1N and 0N
    stage 0  --- clip-1 -->  stage 1  --- clip-2 -->  stage 2      put by 0C and 1C, taken by 1C and 2C

Norms go the way of the last gradients, and the total goes the way of the next step's activations, so neither adds a
trip to the step. docs/project/decisions/clipping.md says more. Stages below the first that trains take no part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stageline.pipeline.schedule import Action, Kind

from .operations import Op, Queue
from .program import Program


@dataclass(frozen=True, slots=True)
class NormClipping:
    """Pass that clips gradients by their norm over all stages before the updates.

    A worker takes the norms of its last stage first, and clips its first stage first.
    """

    @classmethod
    def of(cls, norm: float | None) -> "tuple[NormClipping, ...]":
        """Return the pass that clips by `norm`; none for None."""
        return () if norm is None else (cls(),)

    def lower(self, program: Program) -> Program:
        """Return `program` with norms and clips.

        Raises:
            ScheduleRefused: The mode is asynchronous, where the gradients of one step are never there in all stages at
                one moment; or a stage has replicas.
        """
        schedule = program.schedule
        if schedule.mode == "async":
            raise schedule.refused(
                "gradients are clipped by their norm over all stages, and in asynchronous mode each stage updates at a "
                'time of its own; use mode = "sync", or clip no gradients'
            )
        if schedule.replicas.several:
            raise schedule.refused(
                "there are no gradients clipped by their norm over all stages where a stage has replicas; leave one "
                "of the two out"
            )
        return program.before_updates(lambda stages: _ops(program, stages)).with_queues(_queues(program))


def _ops(program: Program, stages: Sequence[int]) -> Iterator[Op]:
    first, last = program.schedule.first_trainable, program.last
    trained = sorted(stage for stage in stages if stage >= first)
    for stage in reversed(trained):
        takes = [f"norms-{stage}"] if stage < last else []
        yield program.made(Action(Kind.NORMS, stage), takes, [f"norms-{stage - 1}"] if stage > first else [])
    for stage in trained:
        takes = [f"clip-{stage}"] if stage > first else []
        yield program.made(Action(Kind.CLIP, stage), takes, [f"clip-{stage + 1}"] if stage < last else [])


def _queues(program: Program) -> Iterator[Queue]:
    first, last = program.schedule.first_trainable, program.last
    ends = [(f"norms-{stage}", stage + 1, stage) for stage in range(first, last)]
    ends += [(f"clip-{stage}", stage - 1, stage) for stage in range(first + 1, last + 1)]
    for name, source, target in ends:
        yield program.queue(name, source, target)
