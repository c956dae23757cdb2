"""One worker process from start to end: meet the broker, join the queues, run the program, hand in the result.

prepare -> join -> bind -> wait for the peers -> run -> save the weights -> Finished -> serve until Stop -> exit
"""

import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import structlog
import torch

from stageline.broker.control.protocol import Assigned, Failed, Finished, Goodbye
from stageline.broker.errors import BrokerError, EndpointTaken
from stageline.pipeline.data.source import DataError
from stageline.pipeline.errors import ForeignState
from stageline.pipeline.exit_code import ExitCode
from stageline.pipeline.model.load import ModelRefused
from stageline.pipeline.plan import Plan, PlanRefused
from stageline.workers.checkpoint.directory import SnapshotFailed
from stageline.workers.checkpoint.hooks import CheckpointHooks, LocalSnapshots, SnapshotHooks
from stageline.workers.checkpoint.manifest import SnapshotDamaged
from stageline.workers.checkpoint.weights import save_weights
from stageline.workers.control.client import BrokerUnreachable
from stageline.workers.control.commands import CommandHandler
from stageline.workers.control.control_thread import ControlThread
from stageline.workers.control.session import Stopped, TurnedAway, WorkerIdentity
from stageline.workers.replay.bad_microbatch import record_failure
from stageline.workers.replay.capture import RecordingExecutor, RecordingHooks, record_writer
from stageline.workers.replay.record_writer import RecordWriter
from stageline.workers.runs import folder as runs
from stageline.workers.runtime.executor import ComputeFailed, Executor
from stageline.workers.runtime.job import Job, prepare
from stageline.workers.runtime.loop import ActionExecutor
from stageline.workers.runtime.progress import Progress
from stageline.workers.runtime.skipping import SkipLog, skipping

from .open_queues import WorkerQueues, open_queues, reachable
from .signals import Signals, exit_at_once
from .warmup import warm_up

ALONE = (
    "The other stages do not go back for one of them: resume the run as a whole (--resume), and all begin at an older "
    "checkpoint, if there is one that is not damaged"
)

ORPHANED = 0.25  # seconds after which a worker notices that its supervisor is gone

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WorkerOptions:
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


class ExitWatch:
    """Notices that the process should exit: a signal came, or its parent is gone."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._look = 0.0  # when to look for it again
        self._signals = Signals(on_second=exit_at_once)  # whatever the compute loop is in

    def wake_by(self, wake: Callable[[], None]) -> None:
        """A signal calls `wake`, so that a worker that waits for a message calls `check` soon."""
        self._signals.on_first = wake

    def check(self) -> None:
        """Raises `Stopped` if it should."""
        if self._signals.count:
            raise Stopped(f"interrupted by {signal.Signals(self._signals.first).name}", ExitCode.INTERRUPTED)
        if monotonic() >= self._look:
            self._look = monotonic() + ORPHANED
            demand_parent(self._parent)


def demand_parent(parent: int) -> None:
    """Raises `Stopped` if `parent` (0: none) is not the parent any more."""
    if parent and os.getppid() != parent:
        raise Stopped(f"the supervisor (pid {parent}) is gone", ExitCode.FAILED)


def run_worker(plan: Plan, terms: WorkerOptions) -> int:
    """Runs one worker to the end of the run; returns the exit code. A reason to stop early is logged, and told.

    Once it is assigned, SIGINT and SIGTERM end it between two actions, with exit code 130.
    """
    try:
        return _run(plan, terms)
    except (PlanRefused, ModelRefused, DataError) as error:
        log.error("refused", reason=str(error))
        return ExitCode.REFUSED
    except BrokerUnreachable as error:
        log.error("no broker", reason=str(error))
        return ExitCode.NO_BROKER
    except TurnedAway as error:
        (log.error if error.code else log.info)("turned away", reason=str(error))
        return error.code
    except Stopped as stop:
        (log.info if stop.code == ExitCode.OK else log.error)("stopped", reason=str(stop))
        return stop.code
    except (ComputeFailed, BrokerError, SnapshotFailed, SnapshotDamaged, ForeignState) as error:
        # Of the user's own code it is told where; what else is expected to happen has its sentence.
        log.error("failed", reason=str(error), exc_info=error.__cause__ if isinstance(error, ComputeFailed) else None)
        return ExitCode.FAILED


def _run(plan: Plan, terms: WorkerOptions) -> int:
    job = prepare(plan)
    if terms.spare:
        warm_up(job.plan, terms.claim)
    link = ControlThread(terms.broker, _introduction(job.plan, terms))
    try:
        assigned = link.join(terms.patience, lambda: demand_parent(terms.parent), company=terms.company)
        if assigned.index >= len(job.plan.workers):
            raise TurnedAway(
                f"the broker gave place {assigned.index} of a plan with {len(job.plan.workers)} workers",
                ExitCode.FAILED,
            )
        watch = ExitWatch(terms.parent)  # not before: until here, a signal may end the process at once
        log.info("assigned", worker=assigned.index, incarnation=assigned.incarnation, run=assigned.run)
        torch.set_num_threads(job.plan.workers[assigned.index].threads)
        with tempfile.TemporaryDirectory(prefix="stageline-", dir=terms.sockets) as folder:
            _work(job, assigned, link, watch, terms, Path(folder))
    finally:
        link.close()
    return ExitCode.OK


def _work(
    job: Job, assigned: Assigned, link: ControlThread, watch: ExitWatch, terms: WorkerOptions, folder: Path
) -> None:
    def make_room(reason: str) -> None:
        if worker.progress.full is None:
            log.warning("waiting", reason=reason)
        worker.lacks_room()
        ear.listen()  # where a trim comes from

    def blame(error: ComputeFailed) -> str:
        return record_failure(job, executor, queues, error, run, incarnation)

    run, incarnation, start = assigned.run, assigned.incarnation, assigned.step
    last_words = _last_words(link, incarnation, blame, replaced=job.plan.recovery.on)
    with closing(_open(job, assigned, link, folder, make_room)) as queues, last_words:
        executor = job.executor(assigned.index)
        recorder = record_writer(job.plan, assigned.index, run, incarnation, start)
        carrier = _carrier(job, assigned, executor, recorder)
        worker = job.worker(assigned.index, carrier, queues, run=run, incarnation=incarnation, start=start)
        watch.wake_by(queues.ring)
        worker.progress.trouble = lambda: queues.trouble
        worker.progress.begin(job.plan.workers[assigned.index].stages, start, job.route.stages - 1)
        here = reachable(queues.endpoint, terms.broker)
        link.start(assigned, here, worker.progress, steps=job.steps, ring=queues.ring)
        with _recovery(job, assigned, executor, worker.progress, recorder) as recovery:
            ear = CommandHandler(job, assigned, link, watch.check, queues, recovery, worker)
            ear.go_on_from(start)
            ear.wait_for_company(terms.company)
            worker.run(ear.listen, recovery.stepped)
            digests = save_weights(executor.stages, runs.folder(job.plan, run))
            recovery.flush()
            link.say(Finished(incarnation, digests))
            ear.serve_until_stopped(job.plan.recovery.lease)


@contextmanager
def _last_words(
    link: ControlThread, incarnation: int, blame: Callable[[ComputeFailed], str], *, replaced: bool
) -> Iterator[None]:
    """Tells the broker why the work within ends early; of what the user's own code raised, what `blame` says.

    A worker that is interrupted ends the run, unless it can be `replaced`: then it only leaves its place.
    """
    try:
        yield
    except ComputeFailed as error:
        link.say(Failed(incarnation, blame(error), ExitCode.FAILED))
        raise
    except SnapshotDamaged as damage:
        link.say(Failed(incarnation, f"{damage}. {ALONE}", ExitCode.FAILED))
        raise
    except (BrokerError, DataError, SnapshotFailed, ForeignState) as error:
        link.say(Failed(incarnation, str(error), ExitCode.REFUSED if isinstance(error, DataError) else ExitCode.FAILED))
        raise
    except Stopped as stop:
        leaves = stop.told or (stop.code == ExitCode.INTERRUPTED and replaced)
        link.say(Goodbye(incarnation, str(stop)) if leaves else Failed(incarnation, str(stop), stop.code))
        raise
    except BaseException as bug:  # the run must end, and say why, whatever it was
        link.say(Failed(incarnation, f"a bug in stageline: {type(bug).__name__}: {bug}", ExitCode.FAILED))
        raise


def _open(
    job: Job, assigned: Assigned, link: ControlThread, folder: Path, make_room: Callable[[str], None]
) -> WorkerQueues:
    """The worker's queues. If they cannot be had, the broker is told: a replacement could do no better, unless a
    predecessor that hangs still has the address."""
    try:
        return open_queues(job, assigned, folder, make_room)
    except (BrokerError, OSError) as error:  # OSError: a name that cannot be resolved
        reason = f"its queues cannot be opened: {error}"
        later_free = isinstance(error, EndpointTaken) and assigned.step > 0
        link.say(
            Goodbye(assigned.incarnation, reason)
            if later_free
            else Failed(assigned.incarnation, reason, ExitCode.FAILED)
        )
        raise


def _carrier(job: Job, assigned: Assigned, executor: Executor, recorder: RecordWriter | None) -> ActionExecutor:
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
    job: Job, assigned: Assigned, executor: Executor, progress: Progress, recorder: RecordWriter | None
) -> CheckpointHooks:
    progress.layers = lambda instruction: executor.stages[instruction.action.stage].at_layer
    if not job.plan.recovery.on:
        return CheckpointHooks()
    run, incarnation, start = assigned.run, assigned.incarnation, assigned.step
    if recorder is None:
        return SnapshotHooks(job, executor, progress, run=run, incarnation=incarnation, start=start)
    return RecordingHooks(job, executor, progress, recorder, run=run, incarnation=incarnation, start=start)


def _introduction(plan: Plan, terms: WorkerOptions) -> WorkerIdentity:
    disk = LocalSnapshots(plan) if plan.recovery.on else None
    host, settings = socket.gethostname(), plan.as_mapping()
    return WorkerIdentity(plan.digest(), terms.name, host, os.getpid(), terms.claim, settings, disk, terms.spare)
