"""Secrets of one place's queues, which the broker gives to the process that has the place.

    run's key ──> of_link(0, 1) ──> place 0 and place 1: each derives the key of every queue between the two
             ├──> of_link(0, 2) ──> place 0 and place 2
             └──> of_place(1) ────> place 1, whose public key all places know

So no process has the key of a queue that it has no end of, and a process on another disk that takes the place over has
the same keys. Each generation has others: after a machine has lost its right to take part, what it knows is of no use.
`guard_of` says which runs need such secrets.
"""

import hashlib
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import msgspec

from stageline.pipeline.addresses import transport_of
from stageline.pipeline.program import Queue

from .records import Count

_BYTES = 32  # of a queue's key
Secret = Annotated[bytes, msgspec.Meta(max_length=64)]


class PlaceKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Secrets of one place, in one generation. They are not shown.

    Attributes:
        place: Index of the place.
        links: By place, the secret that the place shares with it alone; empty for itself, and in a run without a key.
        secret: Secret key of the place's own sockets; empty if connections have no keys.
        public: Public key of every place, by index; empty if connections have no keys. In a run with parties, from its
            broker: the key of the party that has the place; all secrets are then missing, and each worker makes them.
        salt: Random bytes of the run; empty unless queues seal what they leave with a server.
        generation: Count of the keys that the run has had, which only grows.
        name: Name by which places with one secret key differ at a relay.
    """

    place: Count = 0
    links: tuple[Secret, ...] = ()
    secret: Secret = b""
    public: tuple[Secret, ...] = ()
    salt: Secret = b""
    generation: Count = 0
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def __repr__(self) -> str:
        """Return the keys as text, without the secrets."""
        return f"PlaceKeys(generation={self.generation})"

    def of_queue(self, queue: Queue) -> bytes:
        """Return the key of a queue that has one end at the place, 32 bytes. Raises `ValueError` for another queue."""
        ends = {queue.producer, queue.consumer}
        if self.place not in ends or queue.is_local:
            raise ValueError(
                f"place {self.place} has no key of {queue.name}, from {queue.producer} to {queue.consumer}"
            )
        (other,) = ends - {self.place}
        name = f"{queue.producer}\n{queue.consumer}\n{queue.name}"
        return hashlib.blake2b(name.encode(), key=self.links[other], digest_size=_BYTES).digest()

    def of_requests(self, queues: Iterable[Queue]) -> dict[str, bytes]:
        """Return the keys of those of `queues` that have one end at the place, by name; none in a run without a key."""
        if not self.links:
            return {}
        own = (each for each in queues if not each.is_local and self.place in (each.producer, each.consumer))
        return {queue.name: self.of_queue(queue) for queue in own}


class QueueGuard(StrEnum):
    """Protection of a run's queues, beside the seals of what their ends request."""

    NONE = "none"  # the queues are on one machine, or the run is insecure
    CONNECTIONS = "connections"  # each connection has the keys of the places at its ends
    MESSAGES = "messages"  # what lies at a server is sealed with the key of its queue


def guard_of(queues: str, *, is_private: bool) -> QueueGuard:
    """Return the protection of queues at the address `queues`.

    Args:
        queues: `queues.url` of the plan.
        is_private: True if no other process can read what the broker tells the workers, such as their keys.
    """
    transport = transport_of(queues)
    if not is_private or not transport.crosses(queues):
        return QueueGuard.NONE
    return QueueGuard.MESSAGES if transport.has_server else QueueGuard.CONNECTIONS
