"""Timetables of steps: what each worker ran and what it waited for, and the same steps as they were planned.

    planned     F0 F1       B0 B1         the measured times of actions, by the schedule, and nothing else to wait for
    measured    F0  F1   ≈≈≈   B0 B1      each stretch without an action has its cause

The wait for a message is the schedule's as long as its sender computes; from the end of that it is the wire's.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise

from stageline.broker.control.records import StepRecord
from stageline.broker.ledger.times import WaitCause
from stageline.pipeline.program import Costs, Timed
from stageline.pipeline.schedule import Action, Kind, Schedule, ScheduleRefused, make_schedule

from .findings import Cause, median_times
from .planned import first_step
from .steps import Clocks, MeasuredSteps, Ran

MOST_STEPS = 64  # in one answer
MOST_ACTIONS = 12_000  # likewise, if these are more than two steps: other questions and reports wait for it
SCHEDULE = "schedule"  # the cause of a wait for what another stage has yet to compute
PAUSED = "paused"  # of a wait for the end of a pause, which a person has asked for
LOOP = "loop"  # of what is not a wait: the worker takes, sends, and serves its queues
_LEAST = 1e-6  # seconds: a shorter stretch is none
_PAUSED: dict[WaitCause, str] = {
    WaitCause.PAUSED: PAUSED,
    WaitCause.DISK: Cause.DISK,
    WaitCause.SCRIPT: Cause.SCRIPT,
    WaitCause.EVALUATION: Cause.EVALUATION,
    WaitCause.SWITCHING: Cause.SWITCHING,
    WaitCause.ROOM: Cause.ROOM,
    WaitCause.CREDIT: Cause.CREDIT,
}

Facts = dict[str, object]


def tables(records: Iterable[StepRecord], schedule_at: Callable[[int], Schedule], clocks: Clocks) -> Facts:
    """Return the actions and waits of the steps of `records`, measured and planned, as facts of JSON's own types.

    Args:
        records: Records of steps, of all stages.
        schedule_at: Returns the schedule of a step.
        clocks: Clocks of the workers.
    """
    steps: list[Facts] = []
    ordered = sorted(records, key=lambda record: (record.step, record.stage))
    for _, of in groupby(ordered, key=lambda record: schedule_at(record.step)):
        some = list(of)
        steps += _tables(MeasuredSteps.of(schedule_at(some[0].step), some, clocks))
    newest = steps[-1] if steps else {"step": None, "actions": []}
    return {"step": newest["step"], "actions": newest["actions"], "steps": steps, "clocks": _told(clocks)}


def _told(clocks: Clocks) -> list[Facts]:
    return [
        {"worker": worker, "host": host, "ahead": clocks.of_worker(worker)}
        for worker, host in sorted(clocks.hosts.items())
    ]


def _tables(measured: MeasuredSteps) -> Iterator[Facts]:
    if not measured.steps:
        return
    schedule = _trained(measured)
    planned = _planned(schedule, measured)
    for step in measured.steps:
        ran = [each for each in measured.all if each.step == step]
        begin = min(each.start for each in ran)
        yield {
            "step": step,
            "schedule": schedule.name,
            "start": begin,
            "seconds": max(each.end for each in ran) - begin,
            "actions": [_action(each.action, each.worker, each.start, each.end) for each in ran],
            "idle": [stretch for actions in measured.workers for stretch in _idle(measured, actions, step)],
            "planned": planned,
        }


def _trained(measured: MeasuredSteps) -> Schedule:
    """Return the schedule as these stages ran it: a broker does not know which of them run forward only."""
    schedule = measured.schedule
    back = {schedule.replicas.stage(each.action.stage) for each in measured.all if each.action.kind in ("B", "I")}
    first = min(back, default=schedule.stages)
    if first == schedule.first_trainable:
        return schedule
    try:
        return make_schedule(
            schedule.name,
            schedule.placement,
            schedule.microbatches,
            mode=schedule.mode,
            first_trainable=first,
        )
    except ScheduleRefused:
        return replace(schedule, first_trainable=first)


def _planned(schedule: Schedule, measured: MeasuredSteps) -> list[Facts]:
    """Return a step as the schedule has it, with the measured times of actions, from second 0 on."""
    times = median_times(measured)
    halves = [
        (one, two) if one else (whole / 2, whole / 2)
        for whole, one, two in zip(times["B"], times["I"], times["W"], strict=True)
    ]
    instant = (0.0,) * (schedule.stages - 1)
    costs = Costs(times["F"], tuple(one for one, _ in halves), tuple(two for _, two in halves), times["U"], instant)
    timed = first_step(schedule, costs)
    return [_action(each.action, each.worker, each.start, each.end) for each in timed if _drawn(each)]


def _drawn(timed: Timed) -> bool:
    return timed.end > timed.start or timed.action.kind in set(Kind)


def _action(action: Action, worker: int, start: float, end: float) -> Facts:
    return {
        "kind": str(action.kind),
        "stage": action.stage,
        "microbatch": action.microbatch,
        "worker": worker,
        "start": start,
        "end": end,
    }


def _idle(measured: MeasuredSteps, actions: tuple[Ran, ...], step: int) -> Iterator[Facts]:
    """Yield the stretches of a step in which a worker computed nothing, each with its cause, in order."""
    for before, each in pairwise((None, *actions)):
        if each is None or each.step != step:
            continue
        paused = sum(each.pauses.values()) + each.message
        yield from _stretch(each, each.start - paused if before is None else before.end)
        at = each.start
        for cause, seconds in ((Cause.DATA, each.data), (Cause.OFFLOAD, each.offload)):
            if seconds > _LEAST:
                yield _told_stretch(each.worker, str(cause), None, at, at + seconds)
                at += seconds


def _stretch(each: Ran, begin: float) -> Iterator[Facts]:
    """Yield the parts of the time from `begin` to an action: pauses first, then the wait for its message."""
    at, end = begin, each.start
    for pause, seconds in each.pauses.items():
        if seconds > _LEAST:
            yield _told_stretch(each.worker, str(_PAUSED[pause]), None, at, min(end, at + seconds))
            at = min(end, at + seconds)
    if each.source is not None and each.source.worker != each.worker and each.message > _LEAST:
        sent = min(end, max(at, each.source.end))
        stage = each.source.action.stage
        if sent - at > _LEAST:
            yield _told_stretch(each.worker, SCHEDULE, stage, at, sent)
        if end - sent > _LEAST:
            yield _told_stretch(each.worker, str(Cause.WIRE), stage, sent, end)
    elif end - at > _LEAST:
        yield _told_stretch(each.worker, LOOP, None, at, end)


def _told_stretch(worker: int, cause: str, stage: int | None, start: float, end: float) -> Facts:
    return {"worker": worker, "cause": cause, "stage": stage, "start": start, "end": end}
