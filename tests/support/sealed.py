"""Secrets of the queues of tests, which both ends make by themselves."""

import os
from collections.abc import Callable
from functools import cache, partial
from hashlib import blake2b
from typing import Any

from stageline.broker.keys.sealing import QueueContext, QueueSecret, Sealing
from stageline.broker.queues.ends import QueueOptions
from stageline.pipeline.program import Queue

RUN_SALT = b"the salt of the run"


@cache
def secret_of(queue: Queue, step: int, *, restart: int = 0, word: bytes = b"of the tests") -> QueueSecret:
    context = QueueContext(RUN_SALT, "line-run", queue.name, queue.producer, queue.consumer, restart)
    return QueueSecret(context, blake2b(word + queue.name.encode(), digest_size=32).digest())


def sealing(queue: Queue, *, is_padded: bool = False, **of: object) -> Sealing:
    return Sealing(partial(secret_of, queue, **of), os.urandom, is_padded)  # type: ignore[arg-type]


def sealing_since(since: int) -> Callable[[Queue], Sealing]:
    """How the queues of a run seal that was last resumed as a whole after the incarnation `since`."""
    return partial(sealing, restart=since)


def options_that_seal(**options: Any) -> QueueOptions:
    """The options of a worker in a whole run, whose queues are sealed with secrets made of the run's."""
    return QueueOptions(**options, sealing_of=partial(sealing, word=options["key"]))


# In a model's file: its workers seal their queues.
SEALS_RUN = """
from stageline.workers.process import open_queues
from support.sealed import options_that_seal

open_queues.QueueOptions = options_that_seal
"""
