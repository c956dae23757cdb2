"""A limit on how often peers can cause something: log lines, answers to refused requests."""


class RateLimit:
    """A limit of `most` units a second; the unit that reaches it may exceed it. Times are monotonic, in seconds.

    Attributes:
        withheld: How often the limit refused, since `take_withheld`.
    """

    def __init__(self, most: int) -> None:
        """Create a limit that has used nothing."""
        self.withheld = 0
        self._most = most
        self._since = float("-inf")
        self._used = 0

    def allows(self, now: float, amount: int = 1) -> bool:
        """Return True and use `amount` units if the second that `now` is in has units left; else count a refusal."""
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
