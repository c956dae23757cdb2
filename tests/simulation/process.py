"""A process: it can be killed at any instant, and paused, as by SIGSTOP; what it was to do is done when it wakes."""

from collections.abc import Callable

from simulation.clock import Clock, Deed


class Process:
    """On machine `host`. `ended(status)` is called once, with the status as `subprocess` gives it."""

    def __init__(self, clock: Clock, host: str, ended: Callable[[int], None] = lambda status: None) -> None:
        self.clock = clock
        self.host = host
        self.alive = True
        self.paused = False
        self._ended = ended
        self._held: list[Deed] = []

    def later(self, seconds: float, deed: Deed) -> None:
        """Does `deed` then, if the process is still there."""
        self.clock.after(seconds, lambda: self.do(deed))

    def do(self, deed: Deed) -> None:
        if self.paused:
            self._held.append(deed)
        elif self.alive:
            deed()

    def pause(self, seconds: float) -> None:
        self.paused = True
        self.clock.after(seconds, self._wake)

    def end(self, status: int) -> None:
        if self.alive:
            self.alive = self.paused = False
            self._held.clear()
            self._ended(status)

    def _wake(self) -> None:
        self.paused = False
        held, self._held = self._held, []
        for deed in held:
            self.do(deed)
