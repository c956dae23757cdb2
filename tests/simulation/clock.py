"""Virtual time: what is due next happens next, at once."""

import heapq
from collections.abc import Callable
from itertools import count

Deed = Callable[[], None]


class Clock:
    """`now` is in seconds; two deeds of one instant are done in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._deeds: list[tuple[float, int, Deed]] = []
        self._order = count()

    def after(self, seconds: float, deed: Deed) -> None:
        heapq.heappush(self._deeds, (self.now + seconds, next(self._order), deed))

    def turn(self) -> None:
        """Does what is due next."""
        self.now, _, deed = heapq.heappop(self._deeds)
        deed()
