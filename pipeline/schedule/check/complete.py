"""Checks that a worker's list is complete, and that each action comes after those of its stage that it needs.

What it needs from other workers is checked in `timing.py`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from stageline.pipeline.errors import StagelineError
from stageline.pipeline.schedule import ONCE_PER_STEP, Action, Kind, Schedule
from stageline.pipeline.schedule.actions.precedence import AFTER_PREVIOUS, BUILDS_ON

Program = Sequence[tuple[int, Action]]  # a worker's actions, each after its step


class UnsoundSchedule(StagelineError):
    """No workers can run this schedule; the text names the schedule, the worker and the action."""


class Incomplete(UnsoundSchedule):
    """An action is missing, repeated, or another worker's."""


class Disordered(UnsoundSchedule):
    """A worker's list has an action before one that it builds on."""


def check_complete(schedule: Schedule, worker: int, program: Program, steps: range) -> None:
    """Raises `Incomplete` unless `program` has every action of the worker's stages in `steps` once, and no other.

    A backward may be there whole or as its two halves.
    """
    found = Counter(program)
    wanted = Counter(
        (step, action) for step in steps for stage in schedule.placement[worker] for action in _wanted(schedule, stage)
    )
    _halve(wanted, found)
    for step, action in wanted - found:
        raise Incomplete(f"schedule {schedule.name}: worker {worker} never runs {action} of step {step}")
    for step, action in found - wanted:
        what = "more than once" if (step, action) in wanted else "though it is none of its actions"
        raise Incomplete(f"schedule {schedule.name}: worker {worker} runs {action} of step {step} {what}")


def check_order(schedule: Schedule, worker: int, program: Program) -> None:
    """Raises `Disordered` unless every action comes after those of the same stage that it builds on."""
    places = {run: place for place, run in enumerate(program)}
    for (step, action), place in places.items():
        for earlier in _earlier(schedule, step, action):
            if places.get(earlier, -1) > place:
                raise Disordered(
                    f"schedule {schedule.name}: worker {worker} has {action} of step {step} "
                    f"before {earlier[1]} of step {earlier[0]}, which must come first"
                )


def _wanted(schedule: Schedule, stage: int) -> Iterator[Action]:
    for microbatch in _group(schedule, stage):
        yield Action(Kind.FORWARD, stage, microbatch)
        if schedule.trains(stage):
            yield Action(Kind.BACKWARD, stage, microbatch)
        if schedule.tied == "microbatch" and any(stage == upper for _, upper in schedule.ties):
            yield Action(Kind.TIED, stage, microbatch)
    if schedule.tied == "step" and any(stage in pair for pair in schedule.ties):
        yield Action(Kind.SUBTOTAL, stage)
    if schedule.adds(stage):
        yield Action(Kind.ADD, stage)
    if schedule.clips and stage >= schedule.first_trainable:
        yield Action(Kind.NORMS, stage)
        yield Action(Kind.CLIP, stage)
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
        last = _group(schedule, action.stage)[-1]
        for kind in AFTER_PREVIOUS:
            yield step, Action(kind, action.stage, last)
        for kind in ONCE_PER_STEP[: ONCE_PER_STEP.index(action.kind)]:
            yield step, action._replace(kind=kind)
        return
    group = _group(schedule, action.stage)
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


def _group(schedule: Schedule, stage: int) -> Sequence[int]:
    """The microbatches of a stage, or of a copy of one."""
    return schedule.replicas.groups[stage] if schedule.shares else range(schedule.microbatches)
