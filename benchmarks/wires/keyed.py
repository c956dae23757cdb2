"""The queues over ZeroMQ, whose connections have the keys of two places."""

from dataclasses import replace

from stageline.broker.keys.admission import QueueKeys
from stageline.broker.keys.join_line import keyed
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.queues.secrets import PlacesAdmitted, QueueSecrets

from .ours import TERMS, OurWire, wire_between

PAIRS = [KeyPair.of_secret(bytes(31) + bytes([n])) for n in (1, 2)]
PLACES = PlacesAdmitted(frozenset(pair.public.raw for pair in PAIRS))


def open_keyed_wire(url: str, end: int, nbytes: int) -> OurWire:
    """Each end listens at an address of its own, as `ours.open_wire`, and proves its key."""
    terms = replace(TERMS, secrets=QueueSecrets(curve=QueueKeys(PAIRS[end], PLACES)))
    return wire_between(url, end, terms, keyed("", PAIRS[1 - end].public))
