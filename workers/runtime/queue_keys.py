"""The names of a run's queues as transports have them."""

from functools import cache

from stageline.broker.codec.message import Flow
from stageline.broker.queues.base import QueueKey, QueuePart
from stageline.pipeline.program import Queue

_KNOWN = frozenset(map(str, Flow))


@cache
def queue_key(queue: Queue) -> QueueKey:
    """Return the key of `queue`."""
    flow, _, label = queue.name.partition("-")
    plain = label.isdigit()
    known = flow in _KNOWN
    stage = int(label) if plain else queue.target
    if stage is None:
        raise ValueError(f"{queue.name} names no stage and no worker")
    if plain and known and not queue.order:
        return QueueKey(Flow(flow), stage)
    places = {microbatch: place for place, microbatch in enumerate(queue.microbatches)}
    consumer = stage if queue.target is None else queue.target
    return QueueKey(Flow(flow) if known else flow, consumer, QueuePart(label, places))
