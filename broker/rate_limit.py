"""A limit on how often something may happen that peers can cause: log lines, answers to what is refused."""


class RateLimit:
    """`most` in a second, the last of which may exceed that; `withheld` counts how often there was no more. Times are
    monotonic, in seconds."""

    def __init__(self, most: int) -> None:
        self.withheld = 0
        self._most = most
        self._since = float("-inf")
        self._used = 0

    def allows(self, now: float, amount: int = 1) -> bool:
        if now - self._since >= 1:
            self._since, self._used = now, 0
        if self._used >= self._most:
            self.withheld += 1
            return False
        self._used += amount
        return True

    def take_withheld(self) -> int:
        """Return how many were withheld since the last call."""
        withheld, self.withheld = self.withheld, 0
        return withheld
