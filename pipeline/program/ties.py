"""Stages that share parameters, and send each other gradients of them: pairs of neighbours among these stages.

a parameter of stages 0, 3 and 5     (0, 3) and (3, 5): a chain, since autograd adds up later uses first
another one, of stages 1 and 3       (0, 1), (1, 3) and (3, 5): gradients of the first pass through stage 1

So a stage has at most one neighbour before it, and one after it. docs/project/decisions/tied.md says why.

    stage 0  <-- tied-0 -------   stage 2      put by 2T, taken by 0B (or 0W); or once per step:
    stage 0  <-- subtotal-0 ---   stage 2      put by 2S, taken by 0S
    stage 0  --- total-2 ----->   stage 2      put by 0U, taken by 2U
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from msgspec.structs import replace

from stageline.pipeline.schedule import ENDS_MICROBATCH, Action, Kind, Schedule

from .operations import Op, Per, Queue
from .program import Program

Ties = tuple[tuple[int, int], ...]  # pairs of stages, the lower one first
Tied = Literal["microbatch", "step"]  # after what gradients are sent

_GRADIENTS = {"microbatch": "tied", "step": "subtotal"}


@dataclass(frozen=True, slots=True)
class TiedStages:
    """Pass for stages that share parameters.

    Per microbatch, a `T` comes right after each backward of a stage that has a neighbour before it; such a stage does
    not split its backwards, since the neighbour would wait for gradients that may be deferred. Per step, an `S` of each
    stage that has a neighbour comes after all backwards, the last stage first.

    Attributes:
        ties: Pairs of neighbouring stages, the lower one first.
        sent: "microbatch" to send gradients after each microbatch, "step" to send them once per step.
    """

    ties: Ties
    sent: Tied = "microbatch"

    def lower(self, program: Program) -> Program:
        """Return `program` with the gradients of shared parameters.

        Raises:
            ScheduleRefused: The stages cannot share parameters with this schedule.
        """
        _check(program.schedule, self.ties, self.sent)
        if not self.ties:
            return program
        before, after = {upper: lower for lower, upper in self.ties}, dict(self.ties)
        if self.sent == "microbatch":
            program = program.with_lists(
                lambda worker, ops: tuple(chain.from_iterable(_sending(program, op, before) for op in ops))
            ).rewired(lambda op: _taking(op, after))
        else:
            program = program.before_updates(
                lambda stages: [
                    _subtotal(program, stage, before, after)
                    for stage in sorted(stages, reverse=True)
                    if stage in before or stage in after
                ]
            )
        return program.rewired(lambda op: _totals(op, before, after)).with_queues(self._queues(program))

    def _queues(self, program: Program) -> Iterator[Queue]:
        owner, count = program.schedule.owner, program.schedule.microbatches
        many = self.sent == "microbatch"
        for lower, upper in self.ties:
            yield Queue(
                name=f"{_GRADIENTS[self.sent]}-{lower}",
                producer=owner(upper),
                consumer=owner(lower),
                source=upper,
                target=lower,
                per=Per.MICROBATCH if many else Per.STEP,
                count=count if many else 1,
                carried=tuple(range(count))[::-1] if many and program.schedule.descends else (),
            )
        for lower, upper in self.ties:
            yield program.queue(f"total-{upper}", lower, upper)


def _sending(program: Program, op: Op, before: dict[int, int]) -> tuple[Op, ...]:
    action = op.action
    if action.stage not in before or action.kind in (Kind.FORWARD, Kind.UPDATE):
        return (op,)
    if action.kind == Kind.WEIGHT:
        return ()
    sent = action._replace(kind=Kind.TIED)
    whole = action._replace(kind=Kind.BACKWARD)
    return (
        replace(op, action=whole, name=program.schedule.name_of(whole)),
        Op(sent, program.schedule.name_of(sent), gives=(f"tied-{before[action.stage]}",)),
    )


def _taking(op: Op, after: dict[int, int]) -> Op:
    if op.action.kind in ENDS_MICROBATCH and op.action.stage in after:
        return replace(op, takes=(*op.takes, f"tied-{op.action.stage}"))
    return op


def _subtotal(program: Program, stage: int, before: dict[int, int], after: dict[int, int]) -> Op:
    takes = (f"subtotal-{stage}",) if stage in after else ()
    gives = (f"subtotal-{before[stage]}",) if stage in before else ()
    return program.made(Action(Kind.SUBTOTAL, stage), takes, gives)


def _totals(op: Op, before: dict[int, int], after: dict[int, int]) -> Op:
    stage = op.action.stage
    if op.action.kind != Kind.UPDATE:
        return op
    takes = (*op.takes, f"total-{stage}") if stage in before else op.takes
    gives = (*op.gives, f"total-{after[stage]}") if stage in after else op.gives
    return replace(op, takes=takes, gives=gives)


def _check(schedule: Schedule, ties: Ties, sent: str) -> None:
    if sent not in _GRADIENTS:
        raise schedule.refused(f'stages cannot send what they share per {sent!r}; use tied = "microbatch" or "step"')
    for lower, upper in ties:
        if not schedule.first_trainable <= lower < upper < schedule.stages:
            raise schedule.refused(
                f"stages {lower} and {upper} cannot share a parameter that is trained: the stages that train are "
                f"{schedule.first_trainable} to {schedule.stages - 1}"
            )
    if any(len(set(side)) < len(ties) for side in zip(*ties, strict=True)):
        raise schedule.refused(f"a stage has two neighbours on one side: {ties}")
    if ties and schedule.mode == "async":
        lower, upper = ties[0]
        raise schedule.refused(
            f"stages {lower} and {upper} share a parameter, and in asynchronous mode each stage updates at a time of "
            'its own; use mode = "sync", or cut so that one stage has all uses of it'
        )
    if ties and schedule.replicas.several:
        raise schedule.refused(
            "there are no parameters that stages share where a stage has replicas; leave one of the two out"
        )
