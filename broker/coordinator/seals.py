"""Seals what the broker says to its workers, with the secret of the incarnation that the recipient has proven.

A process without a place has no secret yet, and a command needs none: what they are told is not sealed.
"""

from stageline.broker.control.channel import Envelope
from stageline.broker.control.messages import Assigned
from stageline.broker.control.protocol import encode

from .records import Outgoing, RunRecords

_KEPT = 10_000  # newest addresses of workers: a worker that connects again has another one


class OutgoingSeals:
    """The seals of one broker of a run. Its serials begin at the time, above those of a broker before it."""

    def __init__(self, run: RunRecords) -> None:
        self._run = run
        self._serial = 0
        self._incarnations: dict[bytes, int] = {}  # by address

    def note_proven(self, sender: bytes, incarnation: int) -> None:
        """The worker of `incarnation` has proven that it speaks from the address `sender`."""
        self._incarnations[sender] = incarnation
        if len(self._incarnations) > _KEPT:
            del self._incarnations[next(iter(self._incarnations))]

    def envelope(self, outgoing: Outgoing, now: float) -> Envelope:
        """Return the message as bytes, with its recipient. `now` is in seconds since the epoch."""
        recipient, message = outgoing
        if isinstance(message, Assigned):  # it brings the secret, which its recipient has from now on
            self.note_proven(recipient, message.incarnation)
        incarnation = self._incarnations.get(recipient)
        if incarnation is None:
            return recipient, encode(message)
        self._serial = max(self._serial + 1, int(now * 1e9))
        return recipient, encode(message, self._run.keys.of_incarnation(incarnation), self._serial)
