"""Secrets of the queues of tests, which both ends make by themselves."""

import os
from functools import cache, partial
from hashlib import blake2b

from stageline.broker.keys.sealing import QueueContext, QueueSecret, Sealing
from stageline.broker.queues.secrets import QueueSecrets
from stageline.pipeline.program import Queue

RUN_SALT = b"the salt of the run"


@cache
def secret_of(queue: Queue, step: int, *, restart: int = 0, word: bytes = b"of the tests") -> QueueSecret:
    context = QueueContext(RUN_SALT, "line-run", queue.name, queue.producer, queue.consumer, restart)
    return QueueSecret(context, blake2b(word + queue.name.encode(), digest_size=32).digest())


def sealing(queue: Queue, *, is_padded: bool = False, **of: object) -> Sealing:
    return Sealing(partial(secret_of, queue, **of), os.urandom, is_padded)  # type: ignore[arg-type]


def sealing_since(since: int) -> QueueSecrets:
    """Of the queues of a run that was last resumed as a whole after the incarnation `since`."""
    return QueueSecrets(sealing_of=partial(sealing, restart=since))
