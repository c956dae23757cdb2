"""One worker process from start to end: meet the broker, join the queues, run the program, hand in the result.

prepare -> join -> bind -> wait for the peers -> run -> save the weights -> Finished -> serve until Stop -> exit
"""

import os
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import FrameType

import structlog
import torch

from broker.control import Assigned, Failed, Finished, Goodbye, Peers, Refused, Stop, Trim
from broker.errors import BrokerError
from broker.redis_fitness import RedisUnfit
from pipeline.data import DataError
from pipeline.model import ModelRefused
from pipeline.plan import Plan, PlanRefused
from pipeline.stage import ForeignState

from . import runs
from .bad import told
from .checkpoints import SnapshotFailed
from .client import BrokerUnreachable
from .correspondence import Introduction, TurnedAway
from .executor import ComputeFailed, Executor
from .job import Job, prepare
from .link import Link
from .manifest import SnapshotDamaged
from .progress import Progress
from .recorder import Recorder
from .recording import Recording, RecordingExecutor, recorder_of
from .recovery import Disk, NoRecovery, Recovery, Snapshots
from .skipping import SkipLog, skipping
from .transport import WorkerQueues, open_queues, reachable
from .warmth import warm_up
from .weights import save_weights
from .worker import PATIENCE, Carrier, Worker

STEP_END = 5.0  # seconds that finishing a step may take when the run is stopped
SAY = 1.0  # seconds that the broker may take to hear of the last snapshot
ORPHANED = 0.25  # seconds after which a worker notices that its supervisor is gone

log = structlog.get_logger()


class Stopped(Exception):
    """The worker leaves before its program is over; `code` is the exit code to leave with. `told`: by the broker."""

    def __init__(self, reason: str, code: int, *, told: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.told = told


@dataclass(frozen=True, slots=True)
class Terms:
    """How a worker process is to behave. Times in seconds.

    `claim`: the worker of the plan it wants to be (None: any). `patience`: how long it looks for the broker.
    `company`: how long it then waits for the other workers. `parent`: a process without which it will not go on (0:
    none), so that a killed supervisor leaves nothing behind. `sockets`: the folder for its sockets (None: the
    system's for temporary files), which whoever started it clears when it was killed. `spare`: it waits until another
    worker is lost.
    """

    broker: str
    name: str
    claim: int | None = None
    patience: float = 10.0
    company: float = 600.0
    parent: int = 0
    sockets: str | None = None
    spare: bool = False


def run_worker(plan: Plan, terms: Terms) -> int:
    """Runs one worker to the end of the run; returns the exit code. A reason to stop early is logged, and told.

    Once it is assigned, SIGINT and SIGTERM end it between two actions, with exit code 130.
    """
    try:
        return _run(plan, terms)
    except (PlanRefused, ModelRefused, DataError) as error:
        log.error("refused", reason=str(error))
        return 78
    except BrokerUnreachable as error:
        log.error("no broker", reason=str(error))
        return 3
    except TurnedAway as error:
        (log.error if error.code else log.info)("turned away", reason=str(error))
        return error.code
    except Stopped as stop:
        (log.info if stop.code == 0 else log.error)("stopped", reason=str(stop))
        return stop.code
    except (ComputeFailed, BrokerError, SnapshotFailed, SnapshotDamaged, ForeignState) as error:
        log.error("failed", reason=str(error), exc_info=error.__cause__)
        return 1


def _run(plan: Plan, terms: Terms) -> int:
    job = prepare(plan)
    if terms.spare:
        warm_up(job.plan, terms.claim)
    link = Link(terms.broker, _introduction(job.plan, terms))
    try:
        assigned = link.join(terms.patience, lambda: _demand_parent(terms.parent))
        watch = _Watch(terms.parent)  # not before: until here, a signal may end the process at once
        log.info("assigned", worker=assigned.index, incarnation=assigned.incarnation, run=assigned.run)
        torch.set_num_threads(job.plan.workers[assigned.index].threads)
        with tempfile.TemporaryDirectory(prefix="stageline-", dir=terms.sockets) as folder:
            _work(job, assigned, link, watch, terms, Path(folder))
    finally:
        link.close()
    return 0


def _work(job: Job, assigned: Assigned, link: Link, watch: "_Watch", terms: Terms, folder: Path) -> None:
    def make_room(reason: str) -> None:
        log.warning("waiting", reason=reason)
        ear.listen()  # where a trim comes from

    queues = _open(job, assigned, link, folder, make_room)
    try:
        run, incarnation, start = assigned.run, assigned.incarnation, assigned.step
        executor = job.executor(assigned.index)
        recorder = recorder_of(job.plan, assigned.index, run, incarnation, start)
        carrier = _carrier(job, assigned, executor, recorder)
        worker = job.worker(assigned.index, carrier, queues, run=run, incarnation=incarnation, start=start)
        watch.on_signal = queues.ring
        worker.progress.begin(job.plan.workers[assigned.index].stages, assigned.step, job.route.stages - 1)
        link.start(
            assigned, reachable(queues.endpoint, terms.broker), worker.progress, steps=job.steps, ring=queues.ring
        )
        with _recovery(job, assigned, executor, worker.progress, recorder) as recovery:
            ear = _Ear(job, assigned, link, watch, queues, recovery, worker)
            ear.go_on_from(assigned.step)
            ear.wait_for_company(terms.company)
            worker.run(ear.listen, recovery.stepped)
            digests = save_weights(executor.stages, runs.folder(job.plan, assigned.run))
            recovery.flush()
            link.say(Finished(assigned.incarnation, digests))
            ear.serve_until_stopped(job.plan.recovery.lease)
    except ComputeFailed as error:
        link.say(Failed(incarnation, told(job, executor, queues, error, run, incarnation), 1))
        raise
    except (BrokerError, DataError, SnapshotFailed, SnapshotDamaged, ForeignState) as error:
        link.say(Failed(assigned.incarnation, str(error), 78 if isinstance(error, DataError) else 1))
        raise
    except Stopped as stop:
        farewell = Goodbye(assigned.incarnation, str(stop))
        link.say(farewell if stop.told else Failed(assigned.incarnation, str(stop), stop.code))
        raise
    except Exception as bug:  # the run must end, and say why, whatever it was
        link.say(Failed(assigned.incarnation, f"a bug in stageline: {type(bug).__name__}: {bug}", 1))
        raise
    finally:
        queues.close()


def _open(job: Job, assigned: Assigned, link: Link, folder: Path, make_room: Callable[[str], None]) -> WorkerQueues:
    """The worker's queues. A server that is not fit is told of: it would be no better for a replacement."""
    try:
        return open_queues(job, assigned, folder, make_room)
    except RedisUnfit as error:
        link.say(Failed(assigned.incarnation, str(error), 1))
        raise


def _carrier(job: Job, assigned: Assigned, executor: Executor, recorder: Recorder | None) -> Carrier:
    carrier = skipping(executor, job.plan, _skip_log(job.plan, assigned.run), job.route.stages - 1)
    if recorder is None:
        return carrier
    microbatches = job.schedule.microbatches
    return RecordingExecutor(
        carrier, recorder, run=assigned.run, incarnation=assigned.incarnation, microbatches=microbatches
    )


def _skip_log(plan: Plan, run: str) -> SkipLog:
    return SkipLog(runs.folder(plan, run))


def _recovery(
    job: Job, assigned: Assigned, executor: Executor, progress: Progress, recorder: Recorder | None
) -> Recovery:
    progress.layers = lambda instruction: executor.stages[instruction.action.stage].at_layer
    if not (job.plan.recovery.restarts and job.plan.recovery.snapshot_every):
        return NoRecovery()
    run, incarnation, start = assigned.run, assigned.incarnation, assigned.step
    snapshots = Snapshots(job, executor, progress, run=run, incarnation=incarnation, start=start)
    return snapshots if recorder is None else Recording(snapshots, recorder, start)


def _introduction(plan: Plan, terms: Terms) -> Introduction:
    replaceable = plan.recovery.restarts and plan.recovery.snapshot_every
    disk = Disk(plan) if replaceable else None
    host, settings = socket.gethostname(), plan.as_mapping()
    return Introduction(plan.digest(), terms.name, host, os.getpid(), terms.claim, settings, disk, terms.spare)


def _demand_parent(parent: int) -> None:
    if parent and os.getppid() != parent:
        raise Stopped(f"the supervisor (pid {parent}) is gone", 1)


class _Watch:
    """Notices that the process should go: a signal came, or its parent is gone."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._look = 0.0  # when to look for it again
        self._signal = 0
        self.on_signal: Callable[[], None] = lambda: None
        signal.signal(signal.SIGINT, self._note)
        signal.signal(signal.SIGTERM, self._note)

    def check(self) -> None:
        """Raises `Stopped` if it should."""
        if self._signal:
            raise Stopped(f"interrupted by {signal.Signals(self._signal).name}", 130)
        if monotonic() >= self._look:
            self._look = monotonic() + ORPHANED
            _demand_parent(self._parent)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._signal:  # the second: at once, whatever the compute loop is in
            os._exit(130)
        self._signal = number
        self.on_signal()


class _Ear:
    """Listens to the broker between two turns of the compute loop."""

    def __init__(
        self,
        job: Job,
        assigned: Assigned,
        link: Link,
        watch: _Watch,
        queues: WorkerQueues,
        recovery: Recovery,
        worker: Worker,
    ) -> None:
        self._job = job
        self._assigned = assigned
        self._link = link
        self._watch = watch
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
        self._watch.check()
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
                raise Stopped(f"the other workers did not come within {timeout:g} s: see `stageline status`", 69)
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
