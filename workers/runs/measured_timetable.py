"""The measured timetable of a run, from the times that the broker has recorded."""

from contextlib import closing

from stageline.broker.ledger.history import timed_actions
from stageline.broker.stores.base import Store
from stageline.pipeline.schedule import Schedule
from stageline.pipeline.schedule.check import Timed

TAIL = 3  # steps at the end that are not shown: in these the pipeline drains


def of_run(store: Store | None, schedule: Schedule, steps: int) -> list[Timed]:
    """Every action of a few of the last of `steps` training steps, in seconds since the epoch.

    Nothing without a store, or if it holds no times. Closes the store.
    """
    if store is None:
        return []
    with closing(store):
        return measured(store, schedule, _late(schedule, steps))


def measured(store: Store, schedule: Schedule, steps: range) -> list[Timed]:
    """The actions of `steps`, as far as their times are recorded."""
    found = ((stage, step, store.record(stage, step)) for step in steps for stage in range(schedule.stages))
    return [
        Timed(schedule.owner(stage), action, start, end, step)
        for stage, step, record in found
        if record is not None
        for action, start, end in timed_actions(schedule, record)
    ]


def _late(schedule: Schedule, steps: int) -> range:
    """One synchronous step, or as many asynchronous ones, each of one microbatch, as show how they overlap."""
    shown = 1 if schedule.mode == "sync" else 2 * schedule.stages
    end = max(shown, steps - TAIL)
    return range(max(0, end - shown), min(end, steps))
