"""Which lost workers of a running run are being replaced, since when and why, and how often each was before.

lost ──> missing ──(a worker is given the place)──> returning ──(it has completed an action)──> as if nothing was
            └──(nobody comes)──> the run is given up
"""

from collections import Counter
from collections.abc import Collection

import msgspec


class Replacement(msgspec.Struct):
    """The place of a lost worker, `pid`. Times are seconds since the epoch."""

    index: int
    since: float  # when it was found to be lost
    why: str
    pid: int
    awaited: float  # since when somebody who could take the place is waited for


class Replacements:
    """`restarts` times in a row, a worker may be replaced; `patience` seconds, a place may be empty."""

    def __init__(self, restarts: int, patience: float) -> None:
        self.gaps: dict[int, Replacement] = {}
        self._restarts = restarts
        self._patience = patience
        self._in_a_row: Counter[int] = Counter()  # by index
        self._ever: Counter[int] = Counter()  # likewise

    @property
    def total(self) -> int:
        """How often a worker was replaced in this run."""
        return self._ever.total()

    def life(self, index: int) -> int:
        """Which of the workers that have had the place, one after another, has it now or will have it next; from 1."""
        return self._ever[index] + 1

    def permits(self, index: int) -> bool:
        """Whether the worker may be replaced once more."""
        return self._in_a_row[index] < self._restarts

    def times(self, index: int) -> int:
        """How often in a row the worker was replaced."""
        return self._in_a_row[index]

    def count(self, index: int) -> None:
        """The worker is to be replaced."""
        self._in_a_row[index] += 1
        self._ever[index] += 1

    def open(self, gap: Replacement) -> None:
        """A place became empty."""
        self.gaps[gap.index] = gap

    def close(self, index: int) -> Replacement | None:
        """The worker computes again."""
        return self.gaps.pop(index, None)

    def begin_anew(self) -> None:
        """Nobody is missing and no row goes on; what was replaced in the whole run stays counted."""
        self.gaps.clear()
        self._in_a_row.clear()

    def got_on(self) -> None:
        """A newer checkpoint is complete: the row begins anew."""
        self._in_a_row.clear()

    def overdue(self, missing: Collection[int], now: float) -> list[Replacement]:
        """The places, of those `missing`, for which nobody came."""
        return [gap for gap in self.gaps.values() if gap.index in missing and now - gap.awaited >= self._patience]

    def grant_grace(self, now: float) -> None:
        """The waiting begins anew: the broker itself was away."""
        for gap in self.gaps.values():
            gap.awaited = now

    def facts(self) -> dict[str, object]:
        """What another broker needs in order to `adopt`, as JSON's own types."""
        kept = _StoredReplacements(list(self.gaps.values()), list(self._in_a_row.items()), list(self._ever.items()))
        return msgspec.convert(msgspec.to_builtins(kept), dict[str, object])

    def adopt(self, facts: object, now: float) -> None:
        """Takes up what a former broker knew."""
        kept = msgspec.convert(facts, _StoredReplacements)
        self.gaps = {gap.index: gap for gap in kept.gaps}
        self._in_a_row = Counter(dict(kept.in_a_row))
        self._ever = Counter(dict(kept.ever))
        self.grant_grace(now)


class _StoredReplacements(msgspec.Struct):
    gaps: list[Replacement]
    in_a_row: list[tuple[int, int]]
    ever: list[tuple[int, int]]
