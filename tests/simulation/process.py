"""A process: it can be killed at any instant, and paused, as by SIGSTOP; what it was to do is done when it wakes.

Its threads are greenlets: blocking code of the product runs in them unchanged. What blocks gives control back to the
clock's scheduler, and is resumed by a callback of the clock.
"""

from collections.abc import Callable
from functools import partial

from greenlet import GreenletExit, getcurrent, greenlet

from simulation.clock import Callback, VirtualClock

SHORTEST = 1e-6  # seconds that a wait takes at least: a shorter one might not move the clock


class SimulatedProcess:
    """On machine `host`. `ended(status)` is called once, with the status as `subprocess` gives it.

    It is the `Clock` of the code that runs in it.
    """

    def __init__(self, clock: VirtualClock, host: str, ended: Callable[[int], None] = lambda status: None) -> None:
        self.clock = clock
        self.host = host
        self.alive = True
        self.paused = False
        self._ended = ended
        self._held: list[Callback] = []
        self._threads: list[SimulatedThread] = []

    def time(self) -> float:
        return self.clock.now

    def monotonic(self) -> float:
        return self.clock.now

    def sleep(self, seconds: float) -> None:
        VirtualWakeup(self).wait(seconds)

    def spawn(self, target: Callback) -> "SimulatedThread":
        """Starts a thread."""
        thread = SimulatedThread(self, target)
        self._threads.append(thread)
        return thread

    def later(self, seconds: float, callback: Callback) -> None:
        """Calls `callback` then, if the process is still there."""
        self.clock.after(seconds, partial(self.do, callback))

    def do(self, callback: Callback) -> None:
        if self.paused:
            self._held.append(callback)
        elif self.alive:
            callback()

    def pause(self, seconds: float) -> None:
        self.paused = True
        self.clock.after(seconds, self._continue)

    def end(self, status: int) -> None:
        if self.alive:
            self.alive = self.paused = False
            self._held.clear()
            self._ended(status)
            self.clock.after(0, self._unwind)

    def _continue(self) -> None:
        self.paused = False
        held, self._held = self._held, []
        for callback in held:
            self.do(callback)

    def _unwind(self) -> None:
        for thread in self._threads:
            thread.greenlet.throw()


class SimulatedMember(SimulatedProcess):
    """One that takes a place in the run, under an incarnation; 0 before that."""

    incarnation = 0


class SimulatedThread:
    """A thread of `process` that runs `target`."""

    def __init__(self, process: SimulatedProcess, target: Callback) -> None:
        self.greenlet = greenlet(self._run, process.clock.scheduler)
        self._target = target
        self._over = VirtualWakeup(process)
        process.later(0, self.greenlet.switch)

    def join(self, timeout: float) -> None:
        if not self.greenlet.dead:
            self._over.wait(timeout)

    def _run(self) -> None:
        self._target()
        self._over.set()


class VirtualWakeup:
    """Event that a thread of `process` waits for, until it is set or time is over. A `set` before the wait counts."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._set = False
        self._waiting: greenlet | None = None
        self._waits = 0

    def set(self) -> None:
        if not self._set:
            self._set = True
            self._process.later(0, partial(self._resume, self._waits))

    def wait(self, seconds: float) -> None:
        """Raises `GreenletExit` in a process that has ended."""
        if not self._process.alive:
            raise GreenletExit
        if not self._set:
            self._waiting = getcurrent()
            if seconds < float("inf"):
                self._process.later(max(seconds, SHORTEST), partial(self._resume, self._waits))
            self._process.clock.scheduler.switch()
        self._waits += 1
        self._set = False

    def _resume(self, wait: int) -> None:
        """Ends the wait of this number, if it has begun and not ended."""
        if wait == self._waits and self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting.switch()
