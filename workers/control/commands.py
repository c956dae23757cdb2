"""Takes in what the broker says, between two turns of the compute loop: peers, trims, and the end."""

from collections.abc import Callable
from time import monotonic

import structlog

from stageline.broker.control.protocol import Assigned, Peers, Refused, Stop, Trim
from stageline.pipeline.exit_code import ExitCode
from stageline.workers.checkpoint.hooks import CheckpointHooks
from stageline.workers.process.open_queues import WorkerQueues
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.loop import PATIENCE, WorkerLoop

from .control_thread import ControlThread
from .session import Stopped

STEP_END = 5.0  # seconds that finishing a step may take when the run is stopped
SAY = 1.0  # seconds that the broker may take to hear of the last snapshot

log = structlog.get_logger()


class CommandHandler:
    """Listens to the broker between two turns of the compute loop."""

    def __init__(
        self,
        job: Job,
        assigned: Assigned,
        link: ControlThread,
        check: Callable[[], None],
        queues: WorkerQueues,
        recovery: CheckpointHooks,
        worker: WorkerLoop,
    ) -> None:
        self._job = job
        self._assigned = assigned
        self._link = link
        self._check = check
        self._queues = queues
        self._recovery = recovery
        self._worker = worker
        self._ending: tuple[Stop, float] | None = None  # what ends the run after a step, and until when it may wait
        self._joined = False
        mine = job.plan.workers[assigned.index].stages
        self._takes = [key for key in job.route.queues() if key.stage in mine]
        self._outbound = [queues.outbound(key) for key in job.route.queues() if job.route.producer(key) in mine]

    def go_on_from(self, step: int) -> None:
        """Sets the ends of the queues to the first message of `step`, which is a complete checkpoint if it is not 0."""
        for outbound in self._outbound:
            outbound.trim(min(step, self._job.steps_of(outbound.key)))
        for key in self._takes:
            self._queues.inbound(key).rewind(step)

    def listen(self) -> None:
        """Takes in what the broker has said. Raises `Stopped`."""
        self._check()
        while self._link.inbox:
            match self._link.inbox.popleft():
                case Peers(workers):
                    self._connect({index: endpoint for index, (_, endpoint) in workers.items()})
                case Trim(step):
                    for outbound in self._outbound:
                        outbound.trim(min(step, self._job.steps_of(outbound.key)))
                    self._worker.progress.complete = max(step, self._worker.progress.complete)
                    self._recovery.forget(step)
                case Stop() as stop:
                    self._end(stop)
                case Refused(reason, code):
                    raise Stopped(reason, code, told=True)
                case _:
                    continue
        if self._ending is not None:
            self._leave_with_the_step(*self._ending)

    def _end(self, stop: Stop) -> None:
        """Leaves at once, unless there is a step to finish first that this worker has not gone beyond."""
        now_at = self._worker.step
        late = stop.step is None or now_at is None or now_at > stop.step or self._job.schedule.mode == "async"
        if not stop.at_step_end or late or not self._joined:
            raise Stopped(stop.reason, stop.code, told=True)
        if self._ending is None and stop.step is not None:
            self._recovery.stop_at(stop.step)
            self._ending = stop, monotonic() + STEP_END

    def _leave_with_the_step(self, stop: Stop, deadline: float) -> None:
        done = self._worker.step is None or (stop.step is not None and self._worker.step >= stop.step)
        if not done and monotonic() < deadline:
            return
        if done:
            self._recovery.flush()
            self._link.wait_until_said(SAY)
        raise Stopped(stop.reason, stop.code, told=True)

    def wait_for_company(self, timeout: float) -> None:
        """Returns when every worker of the plan is there. Raises `Stopped`, with code 69, if that takes too long."""
        deadline = monotonic() + timeout
        while not self._joined:
            if monotonic() > deadline:
                raise Stopped(
                    f"the other workers did not come within {timeout:g} s: see `stageline status`", ExitCode.NO_WORKER
                )
            self._queues.pump(PATIENCE)
            self.listen()

    def serve_until_stopped(self, lease: float) -> None:
        """Gives the others what they still want, until the broker says that all have finished.

        A broker that is away is waited for as long as others still have to take something, and a lease longer.
        """
        deadline = monotonic() + lease
        while True:
            self._queues.pump(PATIENCE)
            try:
                self.listen()
            except Stopped as stop:
                if stop.code:
                    raise
                return
            if self._link.silence < lease / 2 or self._wanted():
                deadline = monotonic() + lease
            elif monotonic() > deadline:
                log.warning("the broker is away: the weights are saved, the result could not be reported")
                return

    def _wanted(self) -> bool:
        depths = [outbound.depth() for outbound in self._outbound]
        return any(depth.ready or depth.in_flight for depth in depths)

    def _connect(self, endpoints: dict[int, str]) -> None:
        mine = self._job.plan.workers[self._assigned.index].stages
        owner = self._job.schedule.owner
        self._queues.connect(
            {
                key: endpoints[owner(self._job.route.producer(key))]
                for key in self._job.route.queues()
                if key.stage in mine and self._job.route.producer(key) not in mine
            }
        )
        self._joined = True
