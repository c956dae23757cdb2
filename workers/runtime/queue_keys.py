"""The names of a run's queues as transports have them."""

from functools import cache

from stageline.broker.codec.message import Flow
from stageline.broker.queues.base import QueueKey, QueuePart
from stageline.pipeline.program import Queue


@cache
def queue_key(queue: Queue) -> QueueKey:
    """Return the key of `queue`."""
    flow, _, label = queue.name.partition("-")
    plain = label.isdigit()
    stage = int(label) if plain else queue.target
    if stage is None:
        raise ValueError(f"{queue.name} names no stage and no worker")
    if plain and not queue.order:
        return QueueKey(Flow(flow), stage)
    places = {microbatch: place for place, microbatch in enumerate(queue.microbatches)} if queue.per.many else None
    return QueueKey(Flow(flow), stage if queue.target is None else queue.target, QueuePart(label, places))
