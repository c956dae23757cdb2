"""Memory and retained messages of each worker over a run, as few samples at even distances.

1 s apart   . . . . . . . . . . . .
2 s apart   .   .   .   .   .   .       once there are more than `MOST`: every second one stays
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import msgspec

from stageline.broker.control.messages import Report

MOST = 240  # samples
LEAST = 1.0  # seconds between two
STORED = 10  # looks at the workers, after one of which the samples are stored


class TrendFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of a run, as they are stored.

    Attributes:
        every: Seconds between two samples, at least.
        at: Times, in seconds since the epoch.
        memory: By worker, the bytes of memory that its process took at each time; None where it had not told.
        retained: By worker, the bytes of the messages that it retained, likewise.
    """

    every: float = LEAST
    at: list[float] = []
    memory: list[list[int | None]] = []
    retained: list[list[int | None]] = []


class Trend:
    """Samples of the workers of a run."""

    def __init__(self, workers: int, kept: TrendFacts | None = None) -> None:
        """Start with the samples that were `kept`, of the same number of workers."""
        kept = kept or TrendFacts()
        self._workers = workers
        self._every = kept.every
        self._looks = 0
        self._samples = [
            (at, [each[place] for each in kept.memory], [each[place] for each in kept.retained])
            for place, at in enumerate(kept.at)
        ]

    @classmethod
    def of(cls, workers: int, stored: Mapping[str, object] | None) -> Self:
        """Return the stored samples; none if they are those of another number of workers, or of another form."""
        try:
            kept = msgspec.convert(stored or {}, TrendFacts)
        except msgspec.ValidationError:
            return cls(workers)
        columns = [*kept.memory, *kept.retained]
        if len(columns) == 2 * workers and {len(kept.at)} == {*map(len, columns)} and kept.every >= LEAST:
            return cls(workers, kept)
        return cls(workers)

    def note(self, reports: Iterable[Report | None], now: float) -> bool:
        """Take a sample, if it is time for one; return True if the samples are to be stored.

        Args:
            reports: Newest report of each worker; None of a place without a process.
            now: Time in seconds since the epoch.
        """
        told = list(reports)
        if any(told) and not (self._samples and 0 <= now - self._samples[-1][0] < self._every):
            self._add(told, now)
        self._looks += bool(self._samples)
        return self._looks % STORED == 1

    def facts(self) -> TrendFacts:
        """Return the samples."""
        return TrendFacts(
            every=self._every,
            at=[at for at, _, _ in self._samples],
            memory=[[memory[worker] for _, memory, _ in self._samples] for worker in range(self._workers)],
            retained=[[kept[worker] for _, _, kept in self._samples] for worker in range(self._workers)],
        )

    def _add(self, told: Sequence[Report | None], now: float) -> None:
        memory = [None if each is None else each.memory or None for each in told]
        self._samples.append((now, memory, [None if each is None else each.retained_bytes for each in told]))
        while len(self._samples) > MOST:
            self._samples = self._samples[::2]
            self._every *= 2
