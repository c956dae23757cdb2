"""The timetable that a run really had, from what the broker has kept of its steps."""

from contextlib import closing

from stageline.broker.ledger.history import timed_actions
from stageline.broker.stores.base import Store
from stageline.pipeline.schedule import Schedule
from stageline.pipeline.schedule.check import Timed

TAIL = 3  # steps before the end at which the last one shown lies: the very last ones run the line empty


def of_run(store: Store | None, schedule: Schedule, steps: int) -> list[Timed]:
    """Every action of a few of the last of `steps` training steps, in seconds since the epoch.

    Nothing if no times were kept in `store`, which is closed.
    """
    if store is None:
        return []
    with closing(store):
        return measured(store, schedule, _late(schedule, steps))


def measured(store: Store, schedule: Schedule, steps: range) -> list[Timed]:
    """The actions of `steps`, as far as their times are kept."""
    found = ((stage, step, store.record(stage, step)) for step in steps for stage in range(schedule.stages))
    return [
        Timed(schedule.owner(stage), action, start, end, step)
        for stage, step, record in found
        if record is not None
        for action, start, end in timed_actions(schedule, record)
    ]


def _late(schedule: Schedule, steps: int) -> range:
    """In asynchronous mode a step is one microbatch: as many are taken as show how the steps overlap."""
    shown = 1 if schedule.mode == "sync" else 2 * schedule.stages
    end = max(shown, steps - TAIL)
    return range(max(0, end - shown), min(end, steps))
