"""Opens the broker's records where the plan's `broker.store` says they are. For one broker at a time."""

from broker.errors import BrokerError
from broker.store import Store
from broker.stores.sqlite import SqliteStore
from pipeline.plan import Plan

from . import runs


def open_store(plan: Plan, run: str) -> Store:
    """The records of `run`. Raises `StoreUnusable`."""
    if plan.broker.store == runs.IN_FOLDER:
        return SqliteStore(runs.folder(plan, run) / runs.STORE)
    from broker.stores.redis import RedisStore  # takes time to load

    return RedisStore(plan.broker.store, run)


def kept_store(plan: Plan, run: str) -> Store | None:
    """The same after the run; None if they are still in use, or not there any more."""
    if plan.broker.store == runs.IN_FOLDER and not (runs.folder(plan, run) / runs.STORE).exists():
        return None
    try:
        return open_store(plan, run)
    except BrokerError:
        return None
