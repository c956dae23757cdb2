"""Digests of 16 digits of each step's messages at one end of a queue; the broker compares those of both ends.

A client of the server can replace a stream by another that is as well-formed. The consumer cannot tell, but what it has
taken is then not what the producer has put, and both are reported to the broker, where that client has no say.
"""

from collections import deque
from collections.abc import Hashable
from hashlib import blake2b

from stageline.broker.codec.emptied import digest_of
from stageline.broker.control.messages import StepDigest
from stageline.broker.queues.base import QueueKey


class StepDigests:
    """The digests of the steps of queue `key`, each added to `found` once all messages of its step came in order.

    A step has no digest if it is not seen from its beginning on, or if the content of one of its messages is not known.
    """

    def __init__(self, key: QueueKey, microbatches: int, found: deque[StepDigest]) -> None:
        self._name = str(key)
        self._per_step = key.per_step(microbatches)
        self._found = found
        self._next = -1
        self._messages: list[str | None] = []

    def add(self, number: int, fingerprint: Hashable) -> None:
        """Add message `number`, which was put or taken, to the digest of its step."""
        step, place = divmod(number, self._per_step)
        if place == 0:
            self._messages = []
        elif number != self._next:
            return
        self._next = number + 1
        self._messages.append(digest_of(fingerprint))
        known = [each for each in self._messages if each is not None]
        if place + 1 == len(known) == self._per_step:
            self._found.append((self._name, step, blake2b("".join(known).encode(), digest_size=8).hexdigest()))
