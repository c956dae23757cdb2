"""The first pass: a schedule's lists, with the queues that join neighbouring stages.

    stage 1  --- forward-2 --->   stage 2      put by 1F0, taken by 2F0
    stage 1  <-- backward-1 ---   stage 2      put by 2B0 or 2I0, taken by 1B0 or 1I0

Where stages have replicas, copies are joined that have microbatches in common. Stages below the first that trains get
no gradient back: credit says how far they may be ahead.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import reduce

from stageline.pipeline.schedule import Action, Kind, Schedule
from stageline.pipeline.schedule.replicas import Replicas

from .operations import Op, Per, Queue, in_order
from .program import OpLists, Pass, Program, StepLists

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT)


def compile_program(schedule: Schedule, passes: Iterable[Pass] = ()) -> Program:
    """Return the program of `schedule`, with the additions of each pass in order.

    Raises `ScheduleRefused` if a feature cannot be had with this schedule.
    """
    wanted = tuple(passes)
    return replace(reduce(lambda program, each: each.lower(program), wanted, _base(schedule)), passes=wanted)


def _base(schedule: Schedule) -> Program:
    queues = {queue.name: queue for queue in _neighbours(schedule)}
    wiring = _Wiring(schedule)
    lists: OpLists = tuple(tuple(map(wiring.op, actions)) for actions in schedule.workers)
    return Program(schedule, queues, (StepLists(0, lists),))


def _neighbours(schedule: Schedule) -> Iterator[Queue]:
    replicas, first = schedule.replicas, schedule.first_trainable
    for stage in range(1, schedule.stages):
        yield from _between(schedule, replicas, "forward", stage - 1, stage)
    for stage in range(first, schedule.stages - 1):
        yield from _between(schedule, replicas, "backward", stage + 1, stage)


def _between(schedule: Schedule, replicas: Replicas, flow: str, source: int, target: int) -> Iterator[Queue]:
    for name, (one, other) in replicas.between(flow, source, target).items():
        carried = replicas.common(one, other)
        if flow == "backward" and schedule.descends:
            carried = carried[::-1]
        yield Queue(
            name=name,
            producer=schedule.owner(one),
            consumer=schedule.owner(other),
            source=one,
            target=other,
            count=len(carried),
            carried=in_order(carried),
        )


class _Wiring:
    """Maker of operations from a schedule's actions."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._replicas = schedule.replicas
        self._labels = [schedule.label(copy) for copy in range(schedule.copies)]
        self._owners = {stage: worker for worker, stages in enumerate(schedule.placement) for stage in stages}

    def op(self, action: Action) -> Op:
        """Return the operation of `action`: its name, and the queues that it takes from and gives to."""
        copy = action.stage
        stage = self._replicas.stage(copy)
        name = f"{self._labels[copy]}{action.name}"
        if action.kind == Kind.FORWARD:
            takes = self._queue("forward", stage - 1, copy, action, taken=True) if stage else ()
            gives = self._queue("forward", stage + 1, copy, action, taken=False) if stage < self._last else ()
            return Op(action, name, Per.MICROBATCH, takes, gives, self._awaited(stage, copy, action, gives))
        if action.kind in _BACKWARDS:
            takes = self._queue("backward", stage + 1, copy, action, taken=True) if stage < self._last else ()
            trains_before = stage > self._schedule.first_trainable
            gives = self._queue("backward", stage - 1, copy, action, taken=False) if trains_before else ()
            return Op(action, name, Per.MICROBATCH, takes, gives)
        return Op(action, name, Per.STEP if action.kind == Kind.UPDATE else Per.MICROBATCH)

    @property
    def _last(self) -> int:
        return self._schedule.stages - 1

    def _queue(self, flow: str, stage: int, copy: int, action: Action, *, taken: bool) -> tuple[str]:
        """Return the queue between `copy` and the copy of `stage` that has the action's microbatch."""
        other = self._replicas.having(stage, action.microbatch)
        return (self._replicas.queue(flow, *((other, copy) if taken else (copy, other))),)

    def _awaited(self, stage: int, copy: int, action: Action, gives: tuple[str, ...]) -> str:
        if not gives or self._schedule.trains(copy) or self._schedule.first_trainable >= self._schedule.stages:
            return ""
        other = self._replicas.having(stage + 1, action.microbatch)
        return "" if self._owners[copy] == self._owners[other] else gives[0]
