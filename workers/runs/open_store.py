"""Opens the broker's records where the plan's `broker.store` says they are. For one broker at a time."""

from collections.abc import Callable

from stageline.broker.errors import BrokerError
from stageline.broker.stores.base import Store
from stageline.broker.stores.sqlite import SqliteStore
from stageline.pipeline.plan import Plan

from . import folder as runs

AWAY = 600.0  # seconds that a broker waits for the server that keeps its records


def open_store(plan: Plan, run: str, waiting: Callable[[str], None] = lambda reason: None) -> Store:
    """The records of `run`. `waiting` hears why a server that keeps them is waited for. Raises `StoreUnusable`."""
    if plan.broker.store == runs.IN_FOLDER:
        return SqliteStore(runs.folder(plan, run) / runs.STORE)
    from stageline.broker.stores.redis import RedisStore  # takes time to load

    return RedisStore(plan.broker.store, run, patience=AWAY, waiting=waiting)


def kept_store(plan: Plan, run: str) -> Store | None:
    """The same after the run; None if they are still in use, or not there any more."""
    if plan.broker.store == runs.IN_FOLDER and not (runs.folder(plan, run) / runs.STORE).exists():
        return None
    try:
        return open_store(plan, run)
    except BrokerError:
        return None
