"""Seals what a process sends to the broker: a worker with its incarnation's secret, a command with the run's.

With the same secret a worker checks what the broker says.
"""

from collections.abc import Callable
from time import time

from stageline.broker.control.messages import Assigned, Failed, Finished, Goodbye, Hello, Report, ToBroker
from stageline.broker.control.protocol import MessageSeal, Serials, encode


class Sealer:
    """Counts the serials of one process. They begin at its time, so that they are above those of any process before it
    that had the same secret. `clock` gives the seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time) -> None:
        self._clock = clock
        self._serial = 0
        self._secrets: dict[int, bytes] = {}  # by incarnation
        self._heard = Serials()

    def learn(self, assigned: Assigned) -> None:
        """The worker's messages under this incarnation are sealed from now on."""
        if assigned.secret:
            self._secrets[assigned.incarnation] = assigned.secret

    def is_proven(self, seal: MessageSeal) -> bool:
        """True if the broker made the seal, for a message that has not come before. A worker whose place came without
        a secret can prove nothing, and believes all."""
        if not self._secrets:
            return True
        return any(map(seal.is_of, self._secrets.values())) and self._heard.is_new(seal.serial)

    def forget_serials(self) -> None:
        """There may be another broker, on a machine whose clock is behind."""
        self._heard = Serials()

    def worker_message(self, message: Hello | Report | Failed | Finished | Goodbye) -> bytes:
        """The frame of a worker's message; not sealed if it is under no incarnation."""
        return self.sealed(message, self._secrets.get(message.incarnation, b""))

    def sealed(self, message: ToBroker, secret: bytes) -> bytes:
        """The frame of a message; not sealed if `secret` is empty."""
        self._serial = max(self._serial + 1, int(self._clock() * 1e9))
        return encode(message, secret, self._serial)
