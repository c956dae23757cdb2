"""One worker process from start to end: it loads the plan, gets its place from the broker, and does its work.

prepare -> join -> open the queues -> restore the checkpoint -> `run_assignment` -> exit code
"""

import os
import signal
import socket
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic

import structlog
import torch

from stageline.broker.control.protocol import Assigned, Failed, Goodbye
from stageline.broker.errors import BrokerError, EndpointTaken
from stageline.pipeline.data.source import DataError
from stageline.pipeline.errors import ExitCode, ForeignState
from stageline.pipeline.model.load import ModelRefused
from stageline.pipeline.plan import Plan, PlanRefused
from stageline.workers.checkpoint.directory import SnapshotFailed
from stageline.workers.checkpoint.hooks import CheckpointHooks, LocalSnapshots, SnapshotHooks, open_snapshots
from stageline.workers.checkpoint.snapshot import SnapshotDamaged
from stageline.workers.checkpoint.weights import save_weights
from stageline.workers.control.client import BrokerUnreachable
from stageline.workers.control.commands import CommandHandler, WorkerQueues
from stageline.workers.control.control_thread import ControlThread
from stageline.workers.control.session import Stopped, TurnedAway, WorkerIdentity
from stageline.workers.replay.recorder import (
    RecordingExecutor,
    RecordingHooks,
    RecordWriter,
    record_failure,
    record_writer,
)
from stageline.workers.runs import folder as runs
from stageline.workers.runtime.executor import ComputeFailed, Executor
from stageline.workers.runtime.job import Job, prepare
from stageline.workers.runtime.loop import ActionExecutor
from stageline.workers.runtime.progress import Progress
from stageline.workers.runtime.skipping import SkipLog, skipping

from .assignment import failures_reported, run_assignment
from .open_queues import open_queues, reachable
from .signals import Signals, exit_at_once
from .warmup import warm_up

ORPHANED = 0.25  # seconds after which a worker notices that its supervisor is gone

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker process is to behave. Times in seconds.

    `claim`: the worker of the plan it wants to be (None: any). `broker_timeout`: how long it looks for the broker.
    `workers_timeout`: how long it then waits for the other workers. `parent`: a process without which it exits (0:
    none), so that a killed supervisor leaves nothing behind. `sockets`: the folder for its sockets (None: the system's
    for temporary files), which its supervisor clears if it was killed. `spare`: it waits until another worker is lost.
    """

    broker: str
    name: str
    claim: int | None = None
    broker_timeout: float = 10.0
    workers_timeout: float = 600.0
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


def run_worker(plan: Plan, options: WorkerOptions) -> int:
    """Runs one worker to the end of the run; returns the exit code. A reason to stop early is logged and reported.

    Once it is assigned, SIGINT and SIGTERM end it between two actions, with exit code 130.
    """
    try:
        return _run(plan, options)
    except (PlanRefused, ModelRefused, DataError) as error:
        log.error("refused", reason=str(error))
        return ExitCode.REFUSED
    except BrokerUnreachable as error:
        log.error("no broker", reason=str(error))
        return ExitCode.NO_BROKER
    except Stopped as stop:
        (log.info if stop.code == ExitCode.OK else log.error)("stopped", reason=str(stop))
        return stop.code
    except (ComputeFailed, BrokerError, SnapshotFailed, SnapshotDamaged, ForeignState) as error:
        # A traceback helps where the user's own code raised; every other expected error explains itself.
        log.error("failed", reason=str(error), exc_info=error.__cause__ if isinstance(error, ComputeFailed) else None)
        return ExitCode.FAILED


def _run(plan: Plan, options: WorkerOptions) -> int:
    job = prepare(plan)
    if options.spare:
        warm_up(job.plan, options.claim)
    control = ControlThread(options.broker, _identity(job.plan, options))
    try:
        assigned = control.join(
            options.broker_timeout, lambda: demand_parent(options.parent), workers_timeout=options.workers_timeout
        )
        if assigned.index >= len(job.plan.workers):
            raise TurnedAway(
                f"the broker gave place {assigned.index} of a plan with {len(job.plan.workers)} workers",
                ExitCode.FAILED,
            )
        watch = ExitWatch(options.parent)  # not before: until here, a signal may end the process at once
        log.info("assigned", worker=assigned.index, incarnation=assigned.incarnation, run=assigned.run)
        torch.set_num_threads(job.plan.workers[assigned.index].threads)
        with tempfile.TemporaryDirectory(prefix="stageline-", dir=options.sockets) as folder:
            _work(job, assigned, control, watch, options, Path(folder))
    finally:
        control.close()
    return ExitCode.OK


def _work(
    job: Job, assigned: Assigned, control: ControlThread, watch: ExitWatch, options: WorkerOptions, folder: Path
) -> None:
    def make_room(reason: str) -> None:
        if loop.progress.full is None:
            log.warning("waiting", reason=reason)
        loop.lacks_room()
        commands.handle()  # where a trim comes from

    def explain(error: ComputeFailed) -> str:
        return record_failure(job, executor, queues, error, run, incarnation)

    run, incarnation, start = assigned.run, assigned.incarnation, assigned.step
    reported = failures_reported(control, incarnation, explain, replaced=job.plan.recovery.on)
    with closing(_open_queues(job, assigned, control, folder, make_room)) as queues, reported:
        executor = job.executor(assigned.index)
        recorder = record_writer(job.plan, assigned.index, run, incarnation, start)
        outer = _around(job, assigned, executor, recorder)
        loop = job.worker(assigned.index, outer, queues, run=run, incarnation=incarnation, start=start)
        watch.wake_by(queues.ring)
        loop.progress.trouble = lambda: queues.trouble
        loop.progress.layers = lambda instruction: executor.stages[instruction.action.stage].at_layer
        loop.progress.begin(job.plan.workers[assigned.index].stages, start, job.program.last)
        here = reachable(queues.endpoint, options.broker)
        control.start(assigned, here, loop.progress, steps=job.steps, wake=queues.ring)
        with _hooks(job, assigned, executor, loop.progress, recorder) as hooks:
            commands = CommandHandler(job.program, assigned, control, queues, hooks, loop, check=watch.check)
            run_assignment(
                assigned,
                control,
                commands,
                loop,
                hooks,
                lambda: save_weights(executor.stages, runs.folder(job.plan, run)),
                workers_timeout=options.workers_timeout,
                lease=job.plan.recovery.lease,
            )


def _open_queues(
    job: Job, assigned: Assigned, control: ControlThread, folder: Path, make_room: Callable[[str], None]
) -> WorkerQueues:
    """The worker's queues. If they cannot be had, the broker is told: a replacement could do no better, unless a
    predecessor that hangs still has the address."""
    try:
        return open_queues(job, assigned, folder, make_room)
    except (BrokerError, OSError) as error:  # OSError: a name that cannot be resolved
        reason = f"its queues cannot be opened: {error}"
        later_free = isinstance(error, EndpointTaken) and assigned.step > 0
        control.send(
            Goodbye(assigned.incarnation, reason)
            if later_free
            else Failed(assigned.incarnation, reason, ExitCode.FAILED)
        )
        raise


def _around(job: Job, assigned: Assigned, executor: Executor, recorder: RecordWriter | None) -> ActionExecutor:
    """`executor` with what the plan wants around it: bad microbatches skipped, messages recorded."""
    decisions = SkipLog(runs.folder(job.plan, assigned.run))
    outer = skipping(executor, job.plan, decisions, job.program.last)
    return outer if recorder is None else RecordingExecutor(outer, recorder)


def _hooks(
    job: Job, assigned: Assigned, executor: Executor, progress: Progress, recorder: RecordWriter | None
) -> CheckpointHooks:
    """Restores the checkpoint that the worker begins at."""
    if not job.plan.recovery.on:
        return CheckpointHooks()
    hooks = SnapshotHooks if recorder is None else partial(RecordingHooks, recorder)
    return open_snapshots(job, assigned, executor, progress, hooks)


def _identity(plan: Plan, options: WorkerOptions) -> WorkerIdentity:
    disk = LocalSnapshots(plan) if plan.recovery.on else None
    host, settings = socket.gethostname(), plan.as_mapping()
    return WorkerIdentity(plan.digest(), options.name, host, os.getpid(), options.claim, settings, disk, options.spare)
