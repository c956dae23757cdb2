"""Answer that takes long to compute. It is given again for as long as it takes until its computation hardly counts.

    asked       |     |     |     |     |     |     |     |
    computed    #                       #                       each takes 40 ms of the processor's time
    age in s    0     2     4     6     0     2     4     6     kept for 200 times as long: 0.5 % of that time

The cost is measured where the broker runs, by a clock of the processor's time that is given to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

TIMES = 200  # as long as it took to compute an answer, it is given again
LONGEST = 60.0  # seconds for which one is given again, however long it took

Facts = dict[str, object]


@dataclass(frozen=True, slots=True)
class _Computed:
    """Facts computed at `at`, valid before `until` as long as the run's `circumstances` are these."""

    facts: Mapping[str, object]
    circumstances: object
    at: float
    until: float


def unmeasured() -> float:
    """Return 0, as a clock by which no answer has a cost: then each answer is computed."""
    return 0.0


class KeptAnswer:
    """The newest answer to a question."""

    def __init__(self, spent: Callable[[], float] = unmeasured) -> None:
        """Keep nothing yet.

        Args:
            spent: Returns the processor's time that this thread has used so far, in seconds.
        """
        self._spent = spent
        self._newest: _Computed | None = None

    def given(self, circumstances: object, compute: Callable[[], Mapping[str, object]], now: float) -> Facts:
        """Return the facts, and their `age` in seconds.

        Args:
            circumstances: Circumstances of the answer; one that was computed under others is not given again.
            compute: Computes the facts.
            now: Seconds since the epoch.
        """
        newest = self._newest
        if newest is None or newest.circumstances != circumstances or not newest.at <= now < newest.until:
            newest = self._newest = self._computed(circumstances, compute, now)
        return {**newest.facts, "age": now - newest.at}

    def forget(self) -> None:
        """Forget the newest answer: the next one is computed."""
        self._newest = None

    def _computed(self, circumstances: object, compute: Callable[[], Mapping[str, object]], now: float) -> _Computed:
        before = self._spent()
        facts = compute()
        return _Computed(facts, circumstances, now, now + min(LONGEST, TIMES * (self._spent() - before)))
