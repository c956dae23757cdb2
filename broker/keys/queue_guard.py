"""Protection of the workers' queues from others who can reach them, by where the queues and the broker are."""

from enum import StrEnum

from stageline.pipeline.addresses import transport_of


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
