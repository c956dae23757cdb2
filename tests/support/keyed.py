"""Key pairs and admissions of tests."""

from dataclasses import dataclass, field

from stageline.broker.keys.admission import QueueKeys
from stageline.broker.keys.pairs import KeyPair, PublicKey

BROKER, WORKER, STRANGER, OTHER = (KeyPair.of_secret(bytes(31) + bytes([n])) for n in (1, 2, 3, 4))


@dataclass
class Admitted:
    """An admission of the keys of `pairs`."""

    pairs: list[KeyPair] = field(default_factory=lambda: [WORKER])

    def admits(self, public: PublicKey) -> bool:
        return public in [pair.public for pair in self.pairs]


KEYS = QueueKeys(WORKER, Admitted([WORKER, OTHER]))  # of workers of one party
OTHER_KEYS = QueueKeys(OTHER, Admitted([WORKER, OTHER]))
