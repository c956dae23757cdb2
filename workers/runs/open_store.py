"""Opens the store of a broker's records: SQLite in the run's folder, or Redis. One broker at a time may use it."""

from collections.abc import Callable

from stageline.broker.errors import BrokerError
from stageline.broker.stores.base import Store
from stageline.broker.stores.sqlite import SqliteStore
from stageline.pipeline.plan import Plan

from . import folder as runs

PATIENCE = 600.0  # seconds that a broker waits for a Redis server that is away


def open_store(plan: Plan, run: str, waiting: Callable[[str], None] = lambda reason: None) -> Store:
    """The store of `run`. Calls `waiting(reason)` while it waits for a Redis server. Raises `StoreUnusable`."""
    if plan.broker.store == runs.IN_FOLDER:
        return SqliteStore(runs.folder(plan, run) / runs.STORE)
    from stageline.broker.stores.redis import RedisStore  # slow to import

    return RedisStore(plan.broker.store, run, patience=PATIENCE, waiting=waiting)


def kept_store(plan: Plan, run: str) -> Store | None:
    """The store of a run that is over; None if it is still in use, or was deleted."""
    if plan.broker.store == runs.IN_FOLDER and not (runs.folder(plan, run) / runs.STORE).exists():
        return None
    try:
        return open_store(plan, run)
    except BrokerError:
        return None
