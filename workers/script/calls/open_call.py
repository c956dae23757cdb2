"""A call that workers carry out, and the replies to it."""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from stageline.broker.queues.base import QueueKey
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
