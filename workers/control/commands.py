"""Carries out the broker's commands between two turns of the compute loop: peers, trims, and the end of the run."""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from stageline.broker.control.protocol import Assigned, Peers, Refused, Stop, Trim
from stageline.broker.queues.base import QueueKey, Queues, Trouble
from stageline.pipeline.errors import ExitCode
from stageline.workers.checkpoint.hooks import CheckpointHooks
from stageline.workers.runtime.clock import Clock
from stageline.workers.runtime.loop import PATIENCE, WorkerLoop
from stageline.workers.runtime.program import Program

from .control_thread import ControlThread
from .session import Stopped

STEP_END = 5.0  # seconds that finishing a step may take when the run is stopped
CONFIRMATION = 1.0  # seconds that the broker gets to confirm the last snapshot

log = structlog.get_logger()


class WorkerQueues(Queues, Protocol):
    """The queue ends of one worker among several processes."""

    @property
    def endpoint(self) -> str:
        """Where other workers find these ends, or a name for where all meet."""

    @property
    def trouble(self) -> Trouble | None:
        """What keeps messages from moving, if it is known. For any thread."""

    def connect(self, peers: Mapping[QueueKey, str]) -> None:
        """Take each of these queues from its producer's endpoint, from now on."""

    def ring(self) -> None:
        """Wakes a caller that waits in `take` or `pump`. For any thread, and for signal handlers."""


class CommandHandler:
    """Handles the broker's commands for the worker that has been `assigned` its place.

    `check` raises `Stopped` if the process should exit for a reason of its own.
    """

    def __init__(
        self,
        program: Program,
        assigned: Assigned,
        control: ControlThread,
        queues: WorkerQueues,
        hooks: CheckpointHooks,
        loop: WorkerLoop,
        *,
        check: Callable[[], None],
        clock: Clock = time,
    ) -> None:
        self._program = program
        self._assigned = assigned
        self._control = control
        self._queues = queues
        self._hooks = hooks
        self._loop = loop
        self._check = check
        self._clock = clock
        self._stop: tuple[Stop, float] | None = None  # what ends the run after a step, and until when it may wait
        self._joined = False
        self._producers = program.producers(assigned.index)
        self._inbound = [queues.inbound(key) for key in program.inbound(assigned.index)]
        self._outbound = [queues.outbound(key) for key in program.outbound(assigned.index)]

    def set_queues_to(self, step: int) -> None:
        """The queues begin at the first message of `step`, which is a complete checkpoint if it is not 0."""
        self._trim(step)
        for inbound in self._inbound:
            inbound.rewind(step)

    def handle(self) -> None:
        """Carries out the commands that have come. Raises `Stopped`."""
        self._check()
        commands = self._control.commands
        while commands:
            match commands.popleft():
                case Peers(workers):
                    self._queues.connect({key: workers[index][1] for key, index in self._producers.items()})
                    self._joined = True
                case Trim(step):
                    self._trim(step)
                    self._loop.progress.complete = max(step, self._loop.progress.complete)
                    self._hooks.forget(step)
                case Stop() as stop:
                    self._end(stop)
                case Refused(reason, code):
                    raise Stopped(reason, code, told=True)
                case _:
                    continue
        if self._stop is not None:
            self._end_with_the_step(*self._stop)

    def wait_for_workers(self, timeout: float) -> None:
        """Returns when every worker of the plan is there. Raises `Stopped`, with code 69, if that takes too long."""
        deadline = self._clock.monotonic() + timeout
        while not self._joined:
            if self._clock.monotonic() > deadline:
                raise Stopped(
                    f"the other workers did not come within {timeout:g} s: see `stageline status`", ExitCode.NO_WORKER
                )
            self._queues.pump(PATIENCE)
            self.handle()

    def serve_until_stopped(self, lease: float) -> None:
        """Sends the others what they still need, until the broker says that all have finished.

        A broker that is away is waited for as long as others still have to take something, and `lease` seconds longer.
        """
        deadline = self._clock.monotonic() + lease
        while True:
            self._queues.pump(PATIENCE)
            try:
                self.handle()
            except Stopped as stop:
                if stop.code:
                    raise
                return
            if self._control.silence < lease / 2 or self._has_untaken_messages():
                deadline = self._clock.monotonic() + lease
            elif self._clock.monotonic() > deadline:
                log.warning("the broker is away: the weights are saved, the result could not be reported")
                return

    def _trim(self, step: int) -> None:
        for outbound in self._outbound:
            outbound.trim(min(step, self._program.steps_of(outbound.key)))

    def _end(self, stop: Stop) -> None:
        """Ends at once, unless there is a step to finish first that this worker has not gone beyond."""
        current = self._loop.step
        late = stop.step is None or current is None or current > stop.step or self._program.schedule.mode == "async"
        if not stop.at_step_end or late or not self._joined:
            raise Stopped(stop.reason, stop.code, told=True)
        if self._stop is None and stop.step is not None:
            self._hooks.stop_at(stop.step)
            self._stop = stop, self._clock.monotonic() + STEP_END

    def _end_with_the_step(self, stop: Stop, deadline: float) -> None:
        done = self._loop.step is None or (stop.step is not None and self._loop.step >= stop.step)
        if not done and self._clock.monotonic() < deadline:
            return
        if done:
            self._hooks.flush()
            self._control.wait_until_confirmed(CONFIRMATION)
        raise Stopped(stop.reason, stop.code, told=True)

    def _has_untaken_messages(self) -> bool:
        depths = [outbound.depth() for outbound in self._outbound]
        return any(depth.ready or depth.in_flight for depth in depths)
