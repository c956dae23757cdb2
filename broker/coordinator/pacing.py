"""Answers about the pace of a run: what limits it, steps per second, the timetable of steps, and its course.

A broker that was started again, and a command that reads the records of a run, know the pace from the store.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec

from stageline.broker.control.records import StepRecord
from stageline.broker.ledger.times import last_end
from stageline.broker.slowness.planned import planned_bubble
from stageline.broker.slowness.steps import Clocks
from stageline.broker.slowness.timetable import MOST_ACTIONS, MOST_STEPS, tables
from stageline.broker.slowness.told import slowness
from stageline.pipeline.addresses import Reach, transport_of
from stageline.pipeline.program import UnsoundSchedule
from stageline.pipeline.schedule import Schedule, ScheduleRefused, make_schedule

from .queue_queries import BadQuery
from .state import RunState

Facts = dict[str, object]

_FILLED = 24  # newest steps that are read from the store
_SAMPLED = 40  # older ones, at even distances, so that the beginning of a cause is found
_LOOKED_BACK = 16  # steps, for one of which all times are known: of those before a loss, some are not
_MOST_READ = 4000  # records in all
_MOST_ENDS = 400  # steps of a run whose ends are told


def number(of: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the parameter `name` of a query. Raises `BadQuery` if it is not a number from 0 on."""
    text = of.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise BadQuery(f"{name} must be a number from 0 on, not {text!r}")
    return int(text)


def slow(run: RunState) -> Facts | None:
    """Return what limits the run; None if too few steps are known."""
    schedule, since = schedule_at(run, run.ledger.finished_floor)
    since = max(since, run.pauses.after)
    fill(run)
    planned = _planned_bubble(schedule)
    return slowness(
        schedule,
        run.pace,
        since=since,
        settings=run.config.settings,
        clocks=clocks_of(run),
        planned=planned,
        in_turn=_in_turn(run.config.settings),
    )


def _in_turn(settings: Mapping[str, object]) -> bool:
    """Return True if the queues of the plan reach one process alone, which then computes all stages."""
    queues = settings.get("queues")
    return isinstance(queues, Mapping) and transport_of(str(queues.get("url"))).reach is Reach.PROCESS


def pace_of(run: RunState, now: float) -> Facts:
    """Return the steps per second, the time left, and the bubble as it was measured and as it was planned."""
    rate, steps = run.pace.rate(now), run.training_steps
    schedule, _ = schedule_at(run, run.ledger.finished_floor)
    idle = run.pace.idle(schedule, since=run.pauses.after)
    left = None if steps is None or not rate else max(0, steps - run.ledger.finished_floor) / rate
    over = run.lifecycle.over
    return {
        "last_minute": None if over else rate,
        "best": run.pace.best,
        "left": None if over else left,
        "bubble": {"measured": min(idle, default=None), "planned": _planned_bubble(schedule)},
    }


def timetable(run: RunState, of: Mapping[str, str], now: float) -> Facts:
    """Return all actions of some training steps, with each worker's waits, and the same steps as they were planned.

    Without parameters: the newest step whose times all stages have reported. `actions` are empty, and `step` is None,
    if the newest steps have no such one. `step`, or `first` and `last`, name steps.
    """
    steps = _steps_wanted(run, of)
    schedule, since = schedule_at(run, steps[0])
    wanted = [(copy, step) for step in steps if step >= since for copy in range(schedule.copies)]
    records = run.store.records(wanted[-_MOST_READ:])
    if "step" not in of and "first" not in of:
        newest = _newest_whole(records, schedule)
        records = [record for record in records if record.step == newest]
    return {"run": run.id, **tables(records, lambda step: schedule_at(run, step)[0], clocks_of(run))}


def history(run: RunState, of: Mapping[str, str], now: float) -> Facts:
    """Return the newest losses, returns of lost places, restarts of the broker and complete checkpoints, in order."""
    found = sorted([*run.milestones, *run.pauses.milestones], key=lambda each: each.at)
    return {"run": run.id, "milestones": [msgspec.to_builtins(each) for each in found]}


def course(run: RunState, of: Mapping[str, str], now: float) -> Facts:
    """Return when steps ended on the last stage, and memory and retained messages of the workers over time.

    `ends` has pairs of a step and the time, of steps at even distances and of the newest one. Times are in seconds
    since the epoch.
    """
    floor = run.ledger.finished_floor
    apart = max(1, -(-floor // _MOST_ENDS))
    steps = sorted({*range(0, floor, apart), *range(max(0, floor - 1), floor)})
    last = run.config.schedule.copies - 1
    records = run.store.records([(last, step) for step in steps])
    ends = [[each.step, end] for each in records if (end := last_end(each.times)) is not None]
    return {"run": run.id, "ends": ends, "workers": msgspec.to_builtins(run.trend.facts())}


def _steps_wanted(run: RunState, of: Mapping[str, str]) -> range:
    floor = run.ledger.finished_floor
    if "step" in of:
        first = last = number(of, "step")
    elif "first" in of:
        first, last = number(of, "first"), number(of, "last")
    else:
        return range(max(0, floor - _LOOKED_BACK), max(1, floor))
    if last < first:
        raise BadQuery(f"steps {first}..{last} go backwards: name the earlier one first")
    each = max(1, sum(map(len, schedule_at(run, first)[0].workers)))
    if (count := last - first + 1) > (most := min(MOST_STEPS, max(2, MOST_ACTIONS // each))):
        raise BadQuery(f"steps {first}..{last} are {count}, of {each} actions each: ask for {most} steps at most")
    if last >= floor:
        known = f"steps 0 to {floor - 1} are finished" if floor else "no step is finished yet"
        raise BadQuery(f"step {last} is not finished: {known}")
    return range(first, last + 1)


def _newest_whole(records: Iterable[StepRecord], schedule: Schedule) -> int | None:
    counts = Counter(record.step for record in records if record.times)
    return max((step for step, count in counts.items() if count == schedule.copies), default=None)


def fill(run: RunState) -> None:
    """Read the newest steps from the store, and some older ones, if the pace of the run is not known."""
    floor, copies = run.ledger.finished_floor, run.config.schedule.copies
    if run.pace or not floor:
        return
    newest = range(max(0, floor - _FILLED), floor)
    apart = max(1, newest.start // _SAMPLED)
    steps = sorted({*range(1, newest.start, apart), *newest})[-max(4, _MOST_READ // copies) :]
    run.pace.note(run.store.records([(copy, step) for step in steps for copy in range(copies)]))


def schedule_at(run: RunState, step: int) -> tuple[Schedule, int]:
    """Return the schedule by which `step` went, and the first step that went by it."""
    before = [order for order in run.orders.orders if order.step <= step]
    if not before:
        return run.config.schedule, 0
    order, schedule = before[-1], run.config.schedule
    try:
        return _made(order.name, schedule, order.window), order.step
    except ScheduleRefused:
        return schedule, order.step


@lru_cache(maxsize=8)
def _made(name: str, schedule: Schedule, window: tuple[int, ...] | None) -> Schedule:
    return make_schedule(
        name,
        schedule.placement,
        schedule.microbatches,
        window=window,
        first_trainable=schedule.first_trainable,
        shares=schedule.shares,
    )


@lru_cache(maxsize=8)
def _planned_bubble(schedule: Schedule) -> float | None:
    """Return the share of a step that the busiest worker waits, if all stages take equally long."""
    try:
        return planned_bubble(schedule)
    except (UnsoundSchedule, ValueError):
        return None


def clocks_of(run: RunState) -> Clocks:
    """Return the offsets of the workers' clocks, as they have reported them, and their machines."""
    members = run.registry.members
    offsets = {index: each.report.clock for index, each in members.items() if each.report and each.report.clock}
    workers = range(len(run.config.schedule.placement))
    return Clocks.of(offsets, {index: members[index].host for index in workers if index in members})
