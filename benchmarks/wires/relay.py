"""The queues over ZeroMQ with CURVE: straight from worker to worker, or through a relay."""

from dataclasses import replace

from stageline.broker.keys.admission import QueueKeys
from stageline.broker.keys.join_line import keyed
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.queues.ends import QueueOptions
from stageline.broker.queues.secrets import PlacesAdmitted, QueueSecrets
from stageline.broker.transports.sockets.relay_address import RelayAddress
from stageline.broker.transports.sockets.relay_queues import RelayQueues
from stageline.broker.transports.sockets.zeromq_queues import ZeroMQQueues
from stageline.workers.disk.memory import keep_freed_memory

from .ours import KEYS, TERMS, OurWire

PAIRS = tuple(KeyPair.of_secret(bytes(31) + bytes([end + 1])) for end in range(2))
_ADMITTED = PlacesAdmitted(frozenset(pair.public.raw for pair in PAIRS))


def open_relayed_wire(url: str, end: int, nbytes: int) -> OurWire:
    """Through the relay at `url`."""
    keep_freed_memory()
    address = RelayAddress.parse(url)
    queues = RelayQueues("wire", end + 1, address, _terms(end))
    queues.connect({KEYS[1 - end]: keyed(address.shared.url, PAIRS[1 - end].public)})
    return OurWire(queues, end)


def open_direct_wire(url: str, end: int, nbytes: int) -> OurWire:
    """Over ports of 127.0.0.1 beside that of the relay at `url`, which has nothing to do."""
    keep_freed_memory()
    port = RelayAddress.parse(url).port
    places = [f"tcp://127.0.0.1:{_beside(port, each)}" for each in range(2)]
    queues = ZeroMQQueues("wire", end + 1, places[end], _terms(end))
    queues.connect({KEYS[1 - end]: keyed(places[1 - end], PAIRS[1 - end].public)})
    return OurWire(queues, end)


def _terms(end: int) -> QueueOptions:
    return replace(TERMS, secrets=QueueSecrets(curve=QueueKeys(PAIRS[end], _ADMITTED)))


def _beside(port: int, end: int) -> int:
    """A port below those that the system gives out by itself."""
    return 10_000 + 2 * (port % 10_000) + end
