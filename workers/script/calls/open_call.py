"""A call that workers carry out, and the replies to it."""

from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from stageline.broker.queues.base import QueueKey
from stageline.pipeline.errors import DataError
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.calls import Call

Replies = Mapping[int, Tree]  # to one call, by worker


@dataclass(slots=True)
class OpenCall:
    """A call that is put, and the replies that have come. `done` has them all, in the end."""

    call: Call
    missing: deque[QueueKey]  # the queues of the replies that have not come yet, in the order in which they are taken
    replies: dict[int, Tree] = field(default_factory=dict)
    done: "Future[Replies]" = field(default_factory=Future)


def only(replies: Replies) -> Any:
    """The one reply that says something: that of the last stage's owner."""
    return next((reply for reply in replies.values() if reply is not None), None)


def total(replies: Iterable[Replies]) -> dict[str, float]:
    """The sums of evaluated batches over all their rows: "rows", "loss", and the metrics. Raises `DataError` if there
    are no rows."""
    sums: dict[str, float] = {}
    for each in replies:
        found: Mapping[str, float | None] = only(each)
        for name, value in found.items():
            if value is not None:  # in a batch without rows there is nothing to measure
                sums[name] = sums.get(name, 0.0) + value
    if not sums.get("rows"):
        raise DataError("there are no rows to evaluate. Give at least one batch with rows")
    return sums
