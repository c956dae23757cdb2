"""What the two ends of a queue report to each other, whichever transport carries it.

    consumer ── Credit ────> producer     what has arrived, and what may be sent
    producer ── Retention ─> consumer     what can still be had, and what has been sent

Numbers are absolute ("may be sent what is before number c"), so that a report may be lost, repeated or late: the newest
one says everything.
"""

from typing import NamedTuple

from stageline.broker.errors import Fenced, QueueGap

from .base import QueueKey


class Credit(NamedTuple):
    """Report number `serial` of the consumer with this incarnation: the highest pair of both holds.

    It has all messages before `received`, and those before `limit` may be sent. What was sent from `missing` on is
    lost (None: nothing is).
    """

    incarnation: int
    serial: int
    received: int
    limit: int
    missing: int | None = None


class Retention(NamedTuple):
    """The producer holds its messages from `first` on, and has sent those before `sent`."""

    first: int
    sent: int

    def check_holds(self, key: QueueKey, number: int) -> None:
        """Raises `QueueGap` if message `number` of queue `key` is no longer held."""
        if number < self.first:
            raise QueueGap(
                f"message {number} of {key} cannot be had any more: its producer keeps messages from {self.first} on. "
                "The stage was resumed from before the newest complete checkpoint"
            )


def check_current(duty: str, newest: int, own: int) -> None:
    """Raises `Fenced` if the worker of incarnation `own` was replaced by `newest` in its `duty`, "X is taken"."""
    if newest > own:
        raise Fenced(f"{duty} by incarnation {newest} now; this worker is incarnation {own} and must stop")
