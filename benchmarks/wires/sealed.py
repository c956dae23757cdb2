"""The queues over Redis, sealed with secrets that both ends make by themselves."""

import os
from dataclasses import replace
from hashlib import blake2b

from stageline.broker.keys.sealing import QueueContext, QueueSecret, Sealing
from stageline.broker.queues.secrets import QueueSecrets
from stageline.pipeline.program import Queue

from .ours import TERMS, OurWire
from .redis import wire_over


def open_sealed_wire(url: str, end: int, nbytes: int) -> OurWire:
    """Our queues over the server at `url`, sealed."""
    return wire_over(url, end, replace(TERMS, secrets=QueueSecrets(sealing_of=sealing)))


def sealing(queue: Queue, key: bytes = b"") -> Sealing:
    context = QueueContext(b"salt of the run", "wire", queue.name, queue.producer, queue.consumer)
    secret = QueueSecret(context, blake2b(queue.name.encode(), key=key, digest_size=32).digest())
    return Sealing(lambda step: secret, os.urandom)
