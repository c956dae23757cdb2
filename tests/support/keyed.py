"""Key pairs and admissions of tests."""

from dataclasses import dataclass, field

from stageline.broker.keys.admission import QueueKeys
from stageline.broker.keys.pairs import KeyPair, PublicKey
from stageline.broker.queues.secrets import PlacesAdmitted, QueueSecrets
from stageline.pipeline.program import Queue

BROKER, WORKER, STRANGER, OTHER = (KeyPair.of_secret(bytes(31) + bytes([n])) for n in (1, 2, 3, 4))


@dataclass
class Admitted:
    """An admission of the keys of `pairs`, which had admitted those that are `revoked`."""

    pairs: list[KeyPair] = field(default_factory=lambda: [WORKER])
    revoked: list[KeyPair] = field(default_factory=list)

    def admits(self, public: PublicKey) -> bool:
        return public in [pair.public for pair in self.pairs]

    def has_revoked(self, public: PublicKey) -> bool:
        return public in [pair.public for pair in self.revoked]


KEYS = QueueKeys(WORKER, Admitted([WORKER, OTHER]))  # of workers of one party
OTHER_KEYS = QueueKeys(OTHER, Admitted([WORKER, OTHER]))


def of_place(index: int, generation: int, *queues: Queue) -> QueueSecrets:
    """Those of place 0 or 1, of the keys that all places get in a generation."""
    keys = [KeyPair.of_secret(bytes(30) + bytes([generation, 1 + place])) for place in (0, 1)]
    admission = PlacesAdmitted(frozenset(pair.public.raw for pair in keys))
    return QueueSecrets({queue.name: bytes([generation]) * 32 for queue in queues}, QueueKeys(keys[index], admission))
