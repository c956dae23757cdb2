"""Counts of the two ends of a queue, as the workers that have them report them.

    producer   Depth     put ──────── sent ──────── arrived         and what the consumer has granted
    consumer   Intake                         received ──── taken   and what was sent in vain

Positions are numbers of messages: `put` 40 means that all messages before number 40 were put. They count over the whole
run; a replacement begins again at its checkpoint, so its positions are lower for a while. All other counts are those of
one process since it began.
"""

from enum import StrEnum
from math import isfinite
from typing import Annotated

import msgspec

from .records import Count

KEPT_RESENDS = 4  # newest ones of a queue


class ResendReason(StrEnum):
    """Reason for which a producer sends messages again."""

    MISSING = "reported missing"  # by the consumer: lost or damaged on the way
    CONNECTION = "new connection"  # of the consumer: what the old one held is lost with it
    FORGOTTEN = "forgotten by the server"
    REFILLED = "stream begun again"  # at the server: it had a hole, other keys, or messages of an ended life of the run


class Resend(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Messages from `first` on that were sent, and are sent again up to before `end`, since `ago` seconds."""

    first: Count
    end: Count
    reason: ResendReason
    ago: float = 0.0


class Depth(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Content of a queue at one moment, and the positions of its producer.

    Attributes:
        ready: Messages put and not yet sent to the consumer.
        in_flight: Messages sent, and not yet known to have arrived.
        retained: Messages kept for a rewind, the ones above included.
        bytes: Bytes of the retained messages.
        oldest: Age of the oldest retained message, in seconds.
        put: Position up to which messages were put.
        sent: Position up to which messages were sent.
        arrived: Position up to which the consumer has said that messages arrived.
        granted: Position up to which the consumer lets messages be sent; None without a limit.
        put_bytes: Bytes of all messages that this process has put.
        resent: Messages that this process has sent again.
        resends: The newest of those, in order.
    """

    ready: Count
    in_flight: Count
    retained: Count
    bytes: Count
    oldest: float
    put: Count = 0
    sent: Count = 0
    arrived: Count = 0
    granted: Count | None = None
    put_bytes: Count = 0
    resent: Count = 0
    resends: Annotated[tuple[Resend, ...], msgspec.Meta(max_length=KEPT_RESENDS)] = ()

    @property
    def is_possible(self) -> bool:
        """True if all ages are times that can be."""
        return all(isfinite(age) and age >= 0 for age in (self.oldest, *(each.ago for each in self.resends)))


class Intake(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Positions of a queue's consumer, and what came to it in vain.

    Attributes:
        received: Position up to which messages have arrived.
        taken: Position up to which messages were taken.
        granted: Position up to which the consumer lets messages be sent; None without a limit.
        duplicates: Messages that came although they had arrived before.
        damaged: Messages that came damaged.
        lost: Times that a message was found to be lost or damaged on its way, and was requested again.
    """

    received: Count
    taken: Count
    granted: Count | None = None
    duplicates: Count = 0
    damaged: Count = 0
    lost: Count = 0
