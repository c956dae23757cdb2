"""A clock that is never set.

NTP, or a person, may set the system's clock forward or back by seconds while a run goes on. Times that are compared
over a run, such as the starts and ends of actions or the silence of a worker, would then be wrong by as much: a lost
worker would not be noticed, or a step would seem to have taken an hour. So the system's clock is read once:

    system's clock  ─────────┐   set back         A fork reads its parent's clock: all processes of a run that one
                             └──────────────      process has started have the same one, replacements too. What other
    steady clock    ────────────────────────      machines' clocks differ by is measured: `workers/control/vitals.py`.
"""

import time
from collections.abc import Callable

Read = Callable[[], float]


class SteadyClock:
    """A clock that is never set.

    Attributes:
        monotonic: Returns the seconds of a clock that is never set back, for deadlines.
        sleep: Waits for a number of seconds.
    """

    def __init__(self, system: Read = time.time, monotonic: Read = time.monotonic) -> None:
        """Begin at the time of the system's clock.

        Args:
            system: Returns the seconds since the epoch by the system's clock.
            monotonic: Returns the seconds of a clock that is never set.
        """
        self.monotonic = monotonic
        self.sleep = time.sleep
        self._system = system
        self._offset = system() - monotonic()

    def time(self) -> float:
        """Return the seconds since the epoch."""
        return self.monotonic() + self._offset

    def behind(self) -> float:
        """Return the seconds by which the system's clock was set forward since the beginning."""
        return self._system() - self.time()


STEADY = SteadyClock()
