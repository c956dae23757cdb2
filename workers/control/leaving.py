"""Notice of a worker that it leaves, and the step at whose end it goes.

given (a signal, or the broker's `Leave`) ──> reported ──> the run pauses ──> checkpoint complete ──> `Left`
                                                                └──(time over)──────────────────────────^
"""

from collections.abc import Callable

from stageline.broker.control.leaves import LONGEST_NOTICE, Leaving
from stageline.broker.control.pauses import LONGEST_REASON, HeldBack
from stageline.pipeline.errors import ExitCode

from .joining import Stopped

LAST = 2.0  # seconds before the end of the notice, at most, in which a worker goes without waiting any more
_SHARE = 4  # of a short notice, a fourth is left for that

HandOver = Callable[[float], None]
"""Called before a worker leaves, when its snapshots are on its disk; returns once others can read them, or after the
given number of seconds."""


def keep_here(seconds: float) -> None:
    """Hand nothing over: the place that is left begins with snapshots that other machines can read already."""


class Left(Stopped):
    """End of a worker that has left on notice: its place is free, and the run goes on."""

    def __init__(self, reason: str) -> None:
        """Take the reason, for people."""
        super().__init__(reason, ExitCode.LEFT, broker_knows=True)


class Notice:
    """Notice of one worker, which is given once. For any thread, and for signal handlers.

    Attributes:
        left: True once the worker has nothing left to do but to say goodbye.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        """Begin without a notice; `monotonic` returns the time in seconds."""
        self.left = False
        self._monotonic = monotonic
        self._given: tuple[float, float, str] | None = None  # end, seconds kept for the goodbye, reason

    @property
    def given(self) -> bool:
        """True once the worker is to leave."""
        return self._given is not None

    @property
    def reason(self) -> str:
        """Why the worker leaves, for people; "" if it stays."""
        return "" if self._given is None else self._given[2]

    @property
    def farewell(self) -> str:
        """Why the worker leaves, for people, if its compute loop does not."""
        return f"{self.reason}. The compute loop did not finish its action in time"

    def tell(self) -> Leaving | None:
        """Return the notice for the broker; None if the worker stays."""
        return None if self._given is None else Leaving(max(0.0, self._left), self.reason)

    @property
    def over(self) -> bool:
        """True once the worker must not wait any more for a step, a snapshot or the broker."""
        return self._given is not None and self._left <= self._given[1]

    @property
    def late(self) -> bool:
        """True once the process must end, even if its compute loop does not return."""
        return self._given is not None and self._left <= self._given[1] / 2

    @property
    def patience(self) -> float:
        """Seconds that are left before `over`."""
        return 0.0 if self._given is None else max(0.0, self._left - self._given[1])

    def give(self, seconds: float, reason: str) -> None:
        """Have the worker leave within `seconds`, for `reason`. A second notice changes nothing."""
        seconds = min(seconds, LONGEST_NOTICE)
        if self._given is None:
            self._given = self._monotonic() + seconds, min(LAST, seconds / _SHARE), reason[:LONGEST_REASON]

    def allows(self, held: HeldBack, complete: int, *, joined: bool) -> bool:
        """Return True if the worker may leave now.

        Args:
            held: The order about a pause that the worker obeys.
            complete: The newest complete checkpoint that it was told of.
            joined: True if the other workers were there: before that there is no step to finish.
        """
        saved = held.step is not None and complete >= held.step
        return self.given and (self.over or saved or not joined)

    def leave(self) -> Left:
        """Note that the worker leaves now; return the end to raise."""
        self.left = True
        return Left(f"left on notice: {self.reason}")

    @property
    def _left(self) -> float:
        return 0.0 if self._given is None else self._given[0] - self._monotonic()
