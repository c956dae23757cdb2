"""Checks that a worker's list is complete, and that each action comes after those of its stage that it needs.

Dependencies on other workers are checked in `timing.py`. Messages of a queue are put and taken in one order.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

from stageline.pipeline.errors import StagelineError
from stageline.pipeline.schedule import ONCE_PER_STEP, Action, Kind, Schedule
from stageline.pipeline.schedule.action import AFTER_PREVIOUS, BUILDS_ON

from .operations import Op, Per
from .program import Program

Listed = Sequence[tuple[int, Op]]  # a worker's operations, each after its step

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.TIED)


class UnsoundSchedule(StagelineError):
    """Error that no workers can run a schedule.

    Mend: Mend the function or the file that makes the schedule; `stageline schedule show` draws what it lists.

    Example: schedule mine.py:reverse: worker 0 never runs 0B3 of step 0
    """

    error_code = "SL103"


class Incomplete(UnsoundSchedule):
    """Error that a schedule lacks an action, has it twice, or gives it to another worker.

    Mend: List each forward and backward of each microbatch once, at the worker that has the stage.

    Example: schedule mine.py:reverse: worker 0 never runs 0B3 of step 0
    """

    error_code = "SL104"


class Disordered(UnsoundSchedule):
    """Error that a worker's list has an action before one that it builds on.

    Mend: Move the action that the message names behind the one that must come first.

    Example: schedule mine.py:reverse: worker 1 has 1B0 of step 0 before 1F0 of step 0, which must come first
    """

    error_code = "SL105"


def check_complete(schedule: Schedule, worker: int, steps: range) -> None:
    """Raise `Incomplete` unless the worker's list has every action of its stages in `steps` once, and no other.

    A backward may be there whole or as its two halves.

    Args:
        schedule: Schedule to check.
        worker: Index of the worker.
        steps: Steps to check.
    """
    found = Counter(schedule.program(worker, steps))
    wanted = Counter(
        (step, action) for step in steps for stage in schedule.placement[worker] for action in _wanted(schedule, stage)
    )
    _halve(wanted, found)
    for step, action in wanted - found:
        raise Incomplete(f"schedule {schedule.name}: worker {worker} never runs {action} of step {step}")
    for step, action in found - wanted:
        what = "more than once" if (step, action) in wanted else "though it is none of its actions"
        raise Incomplete(f"schedule {schedule.name}: worker {worker} runs {action} of step {step} {what}")


def check_order(schedule: Schedule, worker: int, listed: Listed) -> None:
    """Raise `Disordered` unless every action comes after those of the same stage that it builds on.

    Args:
        schedule: Schedule to check.
        worker: Index of the worker.
        listed: Operations of the worker, each after its step.
    """
    places = {(step, op.action): place for place, (step, op) in enumerate(listed)}
    for (step, action), place in places.items():
        for earlier in _earlier(schedule, step, action):
            if places.get(earlier, -1) > place:
                raise Disordered(
                    f"schedule {schedule.name}: worker {worker} has {action} of step {step} "
                    f"before {earlier[1]} of step {earlier[0]}, which must come first"
                )


def check_queues(program: Program) -> None:
    """Raise `Disordered` unless the messages of a step are put, and taken, in the order that each queue has."""
    put: defaultdict[str, list[int]] = defaultdict(list)
    taken: defaultdict[str, list[int]] = defaultdict(list)
    for op in chain.from_iterable(program.step):
        for name in op.gives:
            put[name].append(op.action.microbatch)
        for name in op.takes:
            taken[name].append(op.action.microbatch)
    for name in sorted({*put, *taken}):
        order = list(program.queues[name].microbatches)
        for verb, found in (("puts", put[name]), ("takes", taken[name])):
            if found != order and program.queues[name].per is Per.MICROBATCH:
                raise Disordered(
                    f"schedule {program.schedule.name}: a step {verb} the messages of microbatches {found} at {name}, "
                    f"which has them in the order {order}"
                )


def _wanted(schedule: Schedule, stage: int) -> Iterator[Action]:
    for microbatch in schedule.replicas.groups[stage]:
        yield Action(Kind.FORWARD, stage, microbatch)
        if schedule.trains(stage):
            yield Action(Kind.BACKWARD, stage, microbatch)
    # A step of forwards alone, as in evaluation, updates nothing.
    if any(action.kind is not Kind.FORWARD for actions in schedule.workers for action in actions):
        yield Action(Kind.UPDATE, stage)


def _halve(wanted: Counter[tuple[int, Action]], found: Counter[tuple[int, Action]]) -> None:
    for step, action in list(wanted):
        if action.kind is Kind.BACKWARD and (step, action) not in found:
            halves = [(step, Action(kind, action.stage, action.microbatch)) for kind in (Kind.INPUT, Kind.WEIGHT)]
            if any(half in found for half in halves):
                del wanted[step, action]
                wanted.update(halves)


def _earlier(schedule: Schedule, step: int, action: Action) -> Iterator[tuple[int, Action]]:
    if action.kind in ONCE_PER_STEP:
        yield step - 1, action
        for kind in AFTER_PREVIOUS:
            yield step, Action(kind, action.stage, _group(schedule, action.stage, kind)[-1])
        for kind in ONCE_PER_STEP[: ONCE_PER_STEP.index(Kind(action.kind))]:
            yield step, action._replace(kind=kind)
        return
    if action.kind not in AFTER_PREVIOUS:
        return
    group = _group(schedule, action.stage, action.kind)
    place = group.index(action.microbatch)
    previous = (step, group[place - 1]) if place else (step - 1, group[-1])
    for kind in AFTER_PREVIOUS[action.kind]:
        yield previous[0], Action(kind, action.stage, previous[1])
    for kind in BUILDS_ON.get(action.kind, ()):
        yield step, Action(kind, action.stage, action.microbatch)
    if schedule.delays:
        yield step - 2, Action(Kind.UPDATE, action.stage)
    elif schedule.mode == "sync":
        yield step - 1, Action(Kind.UPDATE, action.stage)


def _group(schedule: Schedule, copy: int, kind: str) -> Sequence[int]:
    """Return the microbatches of a stage, or of a copy of one, in the order of its actions of `kind`."""
    group = schedule.replicas.groups[copy]
    return group[::-1] if schedule.descends and kind in _BACKWARDS else group
