"""Which lost workers are being replaced, since when and why, and how often each was replaced before.

lost ──> pending, place empty ──(a worker is placed)──> pending, place taken ──(it completes an action)──> done
              └──(no worker comes in time)──> the run is given up
"""

from collections import Counter

import msgspec


class Replacement(msgspec.Struct):
    """Of the worker of place `index`, whose process was `pid` on `host`. Times are seconds since the epoch."""

    index: int
    since: float  # when the worker was found to be lost
    why: str
    pid: int
    awaited: float  # the deadline for a replacement to come counts from here
    how: str = ""  # its end or its silence alone, continuing a sentence about it
    host: str = ""


class Replacements:
    """The pending replacements, and the counts of all."""

    def __init__(self) -> None:
        self.pending: dict[int, Replacement] = {}  # by index
        self.in_a_row: Counter[int] = Counter()  # by index: replaced since the newest complete checkpoint
        self.ever: Counter[int] = Counter()  # by index: replaced in this run

    def generation(self, index: int) -> int:
        """Counts the workers that have had the place, from 1: the present one's number, or the next one's."""
        return self.ever[index] + 1

    def count(self, index: int) -> None:
        """A worker, or a process that was to become one, was lost."""
        self.in_a_row[index] += 1
        self.ever[index] += 1

    def clear(self) -> None:
        """No replacement is pending; the run's total stays."""
        self.pending.clear()
        self.in_a_row.clear()

    def restart_deadlines(self, now: float) -> None:
        """The broker itself was away."""
        for replacement in self.pending.values():
            replacement.awaited = now
