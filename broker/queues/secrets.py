"""Secrets with which a worker's queues are opened, made of those of its place."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from stageline.broker.control.messages import Assigned
from stageline.broker.keys.admission import QueueKeys
from stageline.broker.keys.pairs import KeyPair, PublicKey
from stageline.pipeline.program import Queue

if TYPE_CHECKING:  # its ciphers take 12 ms to load
    from stageline.broker.keys.sealing import Sealing

Keys: TypeAlias = Mapping[str, bytes]
"""Keys of queues, by their names."""
NO_KEYS: Keys = MappingProxyType({})  # of a run without a key


@dataclass(frozen=True, slots=True)
class QueueSecrets:
    """Secrets of one worker's queues.

    Attributes:
        requests: Keys that seal what the two ends of a queue request of each other, by the queue's name.
        curve: Keys of connections over ZeroMQ. None if they have none.
        sealing_of: Returns how a queue's ends seal what they leave with a server. None if they do not.
    """

    requests: Keys = field(default_factory=dict, repr=False)
    curve: QueueKeys | None = None
    sealing_of: "Callable[[Queue], Sealing] | None" = field(default=None, repr=False)


NO_SECRETS = QueueSecrets()


@dataclass(frozen=True, slots=True)
class PlacesAdmitted:
    """Admission of the places of one run.

    Attributes:
        public: Public keys of the places.
    """

    public: frozenset[bytes]

    def admits(self, public: PublicKey) -> bool:
        """Return True for the key of a place."""
        return public.raw in self.public

    def has_revoked(self, public: PublicKey) -> bool:
        """Return False: a place that is given away has another key."""
        return False


def secrets_of(queues: Iterable[Queue], assigned: Assigned) -> QueueSecrets:
    """Return the secrets of the place that is assigned.

    Args:
        queues: All queues of the program.
        assigned: Place with its keys.
    """
    keys = assigned.keys
    curve = None
    if keys.secret:
        curve = QueueKeys(KeyPair.of_secret(keys.secret), PlacesAdmitted(frozenset(keys.public)), keys.name)
    return QueueSecrets(keys.of_requests(queues), curve, partial(_sealing, assigned) if keys.salt else None)


def _sealing(assigned: Assigned, queue: Queue) -> "Sealing":
    from stageline.broker.keys.sealing import QueueContext, QueueSecret, Sealing

    keys = assigned.keys
    ends = queue.producer, queue.consumer
    context = QueueContext(keys.salt, assigned.run, queue.name, *ends, assigned.since, keys.generation)
    secret = QueueSecret(context, keys.of_queue(queue))
    return Sealing(lambda step: secret, os.urandom)
