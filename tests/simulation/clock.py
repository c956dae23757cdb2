"""Virtual time: what is due next happens next, at once."""

import heapq
from collections.abc import Callable
from itertools import count

from greenlet import getcurrent

Callback = Callable[[], None]


class VirtualClock:
    """`now` is in seconds; two callbacks of one instant are called in the order in which they were planned.

    `scheduler` is the greenlet in which all of them are called.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.scheduler = getcurrent()
        self._planned: list[tuple[float, int, Callback]] = []
        self._order = count()

    def after(self, seconds: float, callback: Callback) -> None:
        heapq.heappush(self._planned, (self.now + seconds, next(self._order), callback))

    def advance(self) -> None:
        """Calls what is due next."""
        self.now, _, callback = heapq.heappop(self._planned)
        callback()
