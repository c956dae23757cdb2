"""The store of a broker's records: SQLite in the run's folder, or Redis. One broker at a time may use it.

Of a run that is over, it gives the measured timetable: when each action began and ended.
"""

from collections.abc import Callable
from contextlib import closing

from stageline.broker.control.sqlite_store import SqliteStore
from stageline.broker.control.store import Store
from stageline.broker.errors import BrokerError
from stageline.broker.ledger.ledger import timed_actions
from stageline.broker.transports.base import backend_of
from stageline.pipeline import retry
from stageline.pipeline.plan import Plan
from stageline.pipeline.program import Timed
from stageline.pipeline.schedule import Schedule

from . import folder as runs

WAITS = 600.0  # seconds that a broker waits for a Redis server that is away
TAIL = 3  # steps at the end that are not shown: in these the pipeline drains


def open_store(plan: Plan, run: str, waiting: Callable[[str], None] | None = None) -> Store:
    """The store of `run`. Raises `StoreUnusable`.

    With `waiting`, faults that may pass are waited for, and `waiting(reason)` is called meanwhile.
    """
    if plan.broker.store == runs.IN_FOLDER:
        file = runs.folder(plan, run) / runs.STORE
        return SqliteStore(file, patience=retry.BOUND, waiting=waiting) if waiting else SqliteStore(file)
    url = plan.broker.store
    return backend_of(url).open_store(url, run, WAITS, waiting or (lambda reason: None))


def measured_timetable(plan: Plan, run: str, schedule: Schedule, steps: int) -> list[Timed]:
    """Every action of a few of the last of `steps` training steps, in seconds since the epoch.

    One synchronous step, or as many asynchronous ones as show how they overlap. Nothing if the
    store of the run is still in use, was deleted, or holds no times.
    """
    if plan.broker.store == runs.IN_FOLDER and not (runs.folder(plan, run) / runs.STORE).exists():
        return []
    shown = 1 if schedule.mode == "sync" else max(2, -(-2 * schedule.stages // schedule.microbatches))
    end = max(shown, steps - TAIL)
    try:
        store = open_store(plan, run)
    except BrokerError:
        return []
    with closing(store):
        return measured(store, schedule, range(max(0, end - shown), min(end, steps)))


def measured(store: Store, schedule: Schedule, steps: range) -> list[Timed]:
    """The actions of `steps`, as far as their times are recorded."""
    found = ((stage, step, store.record(stage, step)) for step in steps for stage in range(schedule.copies))
    return [
        Timed(schedule.owner(stage), action, start, end, step)
        for stage, step, record in found
        if record is not None
        for action, start, end in timed_actions(record)
    ]
