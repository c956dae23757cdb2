"""Which lost workers are being replaced, since when and why, and how often each was replaced before.

lost ──> pending, place empty ──(a worker is placed)──> pending, place taken ──(it completes an action)──> done
              └──(no worker comes in time)──> the run is given up
"""

from collections import Counter
from collections.abc import Collection

import msgspec


class Replacement(msgspec.Struct):
    """Of the worker of place `index`, whose process was `pid`. Times are seconds since the epoch."""

    index: int
    since: float  # when the worker was found to be lost
    why: str
    pid: int
    awaited: float  # the deadline for a replacement to come counts from here


class Replacements:
    """A worker may be replaced `restarts` times in a row; a place may be empty for `patience` seconds."""

    def __init__(self, restarts: int, patience: float) -> None:
        self.pending: dict[int, Replacement] = {}  # by index
        self._restarts = restarts
        self._patience = patience
        self._in_a_row: Counter[int] = Counter()  # by index
        self._ever: Counter[int] = Counter()  # likewise

    @property
    def total(self) -> int:
        """How often a worker was replaced in this run."""
        return self._ever.total()

    def life(self, index: int) -> int:
        """Counts the workers that have had the place, from 1: the present one's number, or the next one's."""
        return self._ever[index] + 1

    def permits(self, index: int) -> bool:
        """Whether the worker may be replaced once more."""
        return self._in_a_row[index] < self._restarts

    def in_a_row(self, index: int) -> int:
        """How often the worker was replaced since the newest complete checkpoint."""
        return self._in_a_row[index]

    def count(self, index: int) -> None:
        """A worker, or a process that was to become one, was lost."""
        self._in_a_row[index] += 1
        self._ever[index] += 1

    def open(self, replacement: Replacement) -> None:
        """A place became empty."""
        self.pending[replacement.index] = replacement

    def close(self, index: int) -> Replacement | None:
        """The replacement has completed an action."""
        return self.pending.pop(index, None)

    def clear(self) -> None:
        """No replacement is pending; the run's total stays."""
        self.pending.clear()
        self._in_a_row.clear()

    def note_checkpoint(self) -> None:
        """A newer checkpoint is complete: counts of replacements in a row start over."""
        self._in_a_row.clear()

    def overdue(self, missing: Collection[int], now: float) -> list[Replacement]:
        """Those among the places `missing` that have been empty for too long."""
        return [
            each for each in self.pending.values() if each.index in missing and now - each.awaited >= self._patience
        ]

    def restart_deadlines(self, now: float) -> None:
        """The broker itself was away."""
        for replacement in self.pending.values():
            replacement.awaited = now

    def facts(self) -> dict[str, object]:
        """What is stored for `restore`, as JSON's own types."""
        kept = _StoredReplacements(list(self.pending.values()), list(self._in_a_row.items()), list(self._ever.items()))
        return msgspec.convert(msgspec.to_builtins(kept), dict[str, object])

    def restore(self, facts: object, now: float) -> None:
        kept = msgspec.convert(facts, _StoredReplacements)
        self.pending = {each.index: each for each in kept.gaps}
        self._in_a_row = Counter(dict(kept.in_a_row))
        self._ever = Counter(dict(kept.ever))
        self.restart_deadlines(now)


class _StoredReplacements(msgspec.Struct):
    gaps: list[Replacement]
    in_a_row: list[tuple[int, int]]
    ever: list[tuple[int, int]]
