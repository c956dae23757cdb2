"""Seals what a process sends to the broker: a worker with its incarnation's secret, a command with the run's."""

from collections.abc import Callable
from time import time

from stageline.broker.control.messages import Assigned, Failed, Finished, Goodbye, Hello, Report, ToBroker
from stageline.broker.control.protocol import encode


class Sealer:
    """Counts the serials of one process. They begin at its time, so that they are above those of any process before it
    that had the same secret. `clock` gives the seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time) -> None:
        self._clock = clock
        self._serial = 0
        self._secrets: dict[int, bytes] = {}  # by incarnation

    def learn(self, assigned: Assigned) -> None:
        """The worker's messages under this incarnation are sealed from now on."""
        if assigned.secret:
            self._secrets[assigned.incarnation] = assigned.secret

    def worker_message(self, message: Hello | Report | Failed | Finished | Goodbye) -> bytes:
        """The frame of a worker's message; not sealed if it is under no incarnation."""
        return self.sealed(message, self._secrets.get(message.incarnation, b""))

    def sealed(self, message: ToBroker, secret: bytes) -> bytes:
        """The frame of a message; not sealed if `secret` is empty."""
        self._serial = max(self._serial + 1, int(self._clock() * 1e9))
        return encode(message, secret, self._serial)
