"""What time is read from, and waited by."""

from typing import Protocol


class Clock(Protocol):
    """The standard module `time` is one. All values are in seconds."""

    def time(self) -> float:
        """Since the epoch: what is comparable between machines, about."""

    def monotonic(self) -> float:
        """Never set back: what deadlines are made of."""

    def sleep(self, seconds: float, /) -> None: ...
