"""The names of a run's queues: of those that its schedule names, and of those that it does not."""

from stageline.broker.codec.message import Flow
from stageline.broker.queues.base import QueueKey


def queue_key(name: str) -> QueueKey:
    """The queue that a schedule calls `name`, as in "forward-1"."""
    flow, _, stage = name.partition("-")
    return QueueKey(Flow(flow), int(stage))


def evaluation_key(stage: int) -> QueueKey:
    """The queue of activations to `stage` when rows held out are evaluated."""
    return QueueKey(Flow.EVALUATION, stage)


def verdict_key(worker: int) -> QueueKey:
    """The queue of the verdicts on rounds of evaluation, to `worker`."""
    return QueueKey(Flow.VERDICT, worker)


def call_key(worker: int) -> QueueKey:
    """The queue of the script's calls to `worker`."""
    return QueueKey(Flow.CALL, worker)


def loss_key(worker: int) -> QueueKey:
    """The queue of the training steps' losses, from `worker`, which has the last stage, to the script."""
    return QueueKey(Flow.LOSS, worker)


def reply_key(worker: int) -> QueueKey:
    """The queue of the replies of `worker` to the script's other calls."""
    return QueueKey(Flow.REPLY, worker)
