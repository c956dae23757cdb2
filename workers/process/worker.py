"""A worker and everything it works with, opened in order and closed in reverse.

queues -> progress -> stages -> reports to the broker -> features -> checkpoint restored -> loop -> commands

The reports begin before the features are opened and the checkpoint is restored: both may take longer than a lease.
A worker that ends early tells the broker why: it gives its place back to a replacement, or ends the run.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import structlog

from stageline.broker.control.messages import Assigned, Failed, Goodbye
from stageline.broker.errors import BrokerError, EndpointTaken, Fenced
from stageline.broker.keys.pairs import KeyPair
from stageline.broker.queues.base import WorkerQueues
from stageline.pipeline.errors import (
    Bug,
    DataError,
    ExitCode,
    GroupLost,
    StagelineError,
    class_name,
    describe_error,
    error_text,
)
from stageline.pipeline.features.ties import copies_in
from stageline.pipeline.printable import bounded
from stageline.pipeline.process.lifeline import NONE
from stageline.pipeline.retry import causes, lacks_memory, passing_fault
from stageline.workers.checkpoint.copier import Bandwidth, Copier
from stageline.workers.checkpoint.copies import DiskCopies, SnapshotLost
from stageline.workers.checkpoint.hooks import Announced, missing_snapshots, open_snapshots
from stageline.workers.checkpoint.inventory import checkpoints_of
from stageline.workers.checkpoint.saved import save_stages
from stageline.workers.checkpoint.sent import sent_stages
from stageline.workers.checkpoint.snapshot import SnapshotDamaged
from stageline.workers.checkpoint.trained_weights import save_weights
from stageline.workers.control.commands import CommandHandler, SavedWeights
from stageline.workers.control.control_thread import ControlThread
from stageline.workers.control.joining import Stopped
from stageline.workers.control.leaving import Left
from stageline.workers.control.peeking import Peeker, all_withheld_by, withheld_by
from stageline.workers.control.restoring import await_snapshots
from stageline.workers.control.views import Views
from stageline.workers.disk.background_writer import WriteFailed
from stageline.workers.runs import folder as runs
from stageline.workers.runs.metrics import MetricsNotWritten
from stageline.workers.runtime.calls import Position
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.losses import ComputeFailed
from stageline.workers.runtime.progress import Progress
from stageline.workers.runtime.stage_memory import OffloadFiles
from stageline.workers.runtime.worker_feature import WorkerFeature, WorkerPlace, explained, features_of, loop_of

from .group import StageGroups
from .join import note_own
from .open_queues import open_queues, reachable
from .stand_ins import StandIns, elastic_stages

RESUME_AS_A_WHOLE = (
    "The other stages do not go back for one of them: resume the run as a whole (--resume), and all begin at an older "
    "checkpoint, if there is one that is not damaged"
)


Texts = Callable[[BaseException, str], str]  # an error and its reason -> what is sent of that
log = structlog.get_logger()


def plain(error: BaseException, reason: str) -> str:
    """Return `reason` unchanged: all of it may be sent."""
    return reason


def withheld(error: BaseException, reason: str) -> str:
    """Return `reason` without the texts of errors of the user's code, which may show values: of a row, or a label."""
    for raised in causes(error.__cause__):
        name = f"{class_name(raised)}, whose text is in this worker's log alone (data.stays)"
        for text in (describe_error(raised), error_text(raised)):
            reason = reason.replace(text, name)
    return reason


@contextmanager
def failures_reported(
    control: ControlThread,
    incarnation: int,
    explain: Callable[[ComputeFailed], str],
    *,
    replaced: bool,
    texts: Texts = plain,
) -> Iterator[None]:
    """Report to the broker why the work within ends early.

    A worker that is interrupted ends the run, unless it can be replaced: then it only gives its place back. These give
    their place back in the same way:

    - A worker with a queue end that belongs to a newer incarnation. If the broker takes the worker for current, the
      broker's records are old.
    - A worker that leads a group of processes, of which another one is lost.
    - A worker that lacks memory, or descriptors where the user's code needs them: a fresh process has its own.

    A worker that leaves on notice says goodbye later, once its queues are closed.

    Args:
        control: Connection to the broker.
        incarnation: Incarnation of the worker.
        explain: Returns the reason for an error of the user's own code.
        replaced: True if the worker can be replaced.
        texts: Returns the text to send, given the error and its reason.
    """
    try:
        yield
    except Left:
        raise
    except BaseException as error:  # whatever it was, the run must end with its reason
        leaves = isinstance(error, Stopped) and error.exit_code == ExitCode.INTERRUPTED
        leaves = leaves or isinstance(error, Fenced | GroupLost) or lacks_resources(error)
        if (isinstance(error, Stopped) and error.broker_knows) or (leaves and replaced):
            control.send(Goodbye(incarnation, bounded(texts(error, why_it_leaves(error)))))
        else:
            reason, code = _cause(error, explain)
            control.send(Failed(incarnation, bounded(texts(error, reason)), code))
        raise


def lacks_resources(error: BaseException) -> bool:
    """Return True if another process could do better after this error.

    Returns False after a fault that did not pass while it was waited for, as on a disk, unless memory was lacking.
    """
    if isinstance(error, WriteFailed | SnapshotDamaged | MetricsNotWritten | BrokerError):
        return lacks_memory(error)
    return passing_fault(error) is not None


def why_it_leaves(error: BaseException) -> str:
    """Return why a worker gives its place back, for people."""
    if isinstance(error, Stopped | Fenced | GroupLost | ComputeFailed | DataError):
        return str(error)
    return f"lacks memory: {error}" if lacks_memory(error) else f"lacks resources: {error}"


def _cause(error: BaseException, explain: Callable[[ComputeFailed], str]) -> tuple[str, int]:
    """Return why a worker ends, for people, and its exit code."""
    match error:
        case ComputeFailed():
            return explain(error), error.exit_code
        case SnapshotDamaged():
            return error.coded(f"{error.args[0]}. {RESUME_AS_A_WHOLE}"), error.exit_code
        case StagelineError():
            return str(error), error.exit_code
        case KeyboardInterrupt():  # no signal: those end the loop between two actions
            return "the model, the data or a metric raised KeyboardInterrupt", ExitCode.FAILED
        case _ if lacks_resources(error):
            return why_it_leaves(error), ExitCode.FAILED
        case _:
            return str(Bug(error)), ExitCode.FAILED


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a worker process. Times are in seconds.

    Attributes:
        broker: Address of the broker.
        name: Name of the worker in reports.
        claim: Index of the worker of the plan that the process is to be. None for any.
        broker_timeout: Time to look for the broker.
        workers_timeout: Time to wait for the other workers then.
        lifeline: Pipe at whose end the process exits, so that a killed supervisor leaves nothing behind. -1 for none.
        sockets: Folder for its sockets, which is cleared if the process was killed. None for a folder of its own.
        spare: True to wait until another worker is lost.
        joined: True if the plan is that of a script on another machine. The process then writes files in `run.dir`
            only.
        command: Command by which other workers of the plan are started here, if the plan asks for it.
        standing_in: True if another worker has started this process for the place of a lost replica. If it cannot take
            the place, the run goes on without it.
        pair: Pair by which the broker knows the process; None for an address without a key.
        alive: Path of the file that is touched as long as the worker progresses; None for none.
        over: Called once the broker has said that the run is over.
        notice: Seconds from SIGTERM until the process must be gone: it leaves, and the run goes on. None without.
    """

    broker: str
    name: str
    claim: int | None = None
    broker_timeout: float = 10.0
    workers_timeout: float = 600.0
    lifeline: int = NONE
    sockets: str | None = None
    spare: bool = False
    joined: bool = False
    command: tuple[str, ...] = ()
    standing_in: bool = False
    pair: KeyPair | None = None
    notice: float | None = None
    alive: Path | None = None
    over: Callable[[], object] = lambda: None


class Worker:
    """A worker that has its place in the run, ready to run."""

    def __init__(
        self,
        stack: ExitStack,
        job: Job,
        assigned: Assigned,
        control: ControlThread,
        options: WorkerOptions,
        folder: Path,
    ) -> None:
        """Open everything that the worker needs.

        Args:
            stack: Closes what the worker opens, also if opening fails halfway.
            job: The run's job, with this worker's stages.
            assigned: Place of the worker.
            control: Connection to the broker, on which the worker has not reported yet.
            options: Options of the process.
            folder: Folder for its sockets.
        """
        self._job, self._assigned, self._control, self._options = job, assigned, control, options
        self._ready = False
        self._features: Sequence[WorkerFeature] = ()
        self._queues = queues = stack.enter_context(closing(self._open_queues(folder)))
        groups = stack.enter_context(StageGroups(job))
        texts = plain if job.plan.data.stays is None else withheld
        failing = control, assigned.incarnation, lambda error: explained(self._features, error)
        stack.enter_context(failures_reported(*failing, replaced=job.plan.recovery.on, texts=texts))
        if options.joined:
            note_own(job.plan, assigned.run)
        calls = job.calls_by(assigned.orders, assigned.closed, assigned.step)
        self._progress = progress = Progress.of(calls, assigned.index, start=assigned.step, queues=queues)
        self._folder = runs.folder(job.plan, assigned.run)
        files = stack.enter_context(OffloadFiles(job.plan, self._folder / "offload", progress))
        executor = job.executor(job.schedule.placement[assigned.index], make=groups.make, offload=files.of)
        files.give_back()
        self._stages = executor.stages
        checkpoints = checkpoints_of(job.plan, assigned.run)
        missing = missing_snapshots(job, assigned, checkpoints)
        copier = self._copier(stack.enter_context(DiskCopies(checkpoints, missing, progress.noting("copies"))))
        progress.copies.lack(missing)
        here, steps = reachable(queues.endpoint, options.broker), job.training_steps
        keyed = options.pair is not None
        content = withheld_by(job.plan, keyed=keyed)
        control.start(
            assigned,
            here,
            progress,
            steps=steps,
            wake=self._wake,
            where=lambda each: self._stages[each].where,
            views=Views(
                Peeker(assigned.run, assigned.index, queues, content),
                shows_code=not all_withheld_by(job.plan, keyed=keyed),
                log_withheld=all_withheld_by(job.plan, keyed=False),  # as for texts of exceptions, which it may have
            ),
        )
        names = assigned.index, assigned.run, assigned.incarnation, assigned.step
        place = WorkerPlace(job, self._folder, *names, executor, queues, progress, self._serve)
        await_snapshots(
            missing,
            copier,
            control,
            queues,
            job.program,
            progress,
            lambda each: SnapshotLost(checkpoints.path(*each)),
        )
        self._features = features_of(place, stack.enter_context)
        if elastic_stages(job.plan) and options.command:
            there = options.broker, options.pair
            stack.enter_context(StandIns(job.schedule, job.plan, assigned.index, there, options.command))
        hooks = stack.enter_context(open_snapshots(place, assigned, self._features, self._announced))
        save = (lambda folder, position: sent_stages(self._stages)) if options.joined else self._save_checkpoint
        self._loop = loop_of(place, self._features, calls, keep=hooks.keep, save=save)
        self._commands = CommandHandler(assigned, control, queues, hooks, self._loop, copier)
        self._ready = True

    def run(self) -> None:
        """Run to the end of the run. Raises `Stopped`, and any error of computing, of the queues and of the disk."""
        timeout, lease = self._options.workers_timeout, self._job.plan.recovery.lease
        self._commands.run(self._save, workers_timeout=timeout, lease=lease)

    def _copier(self, store: DiskCopies) -> Copier:
        """Return the worker's ends of transfers of snapshots, which end in `store`."""
        assigned, limit = self._assigned, self._job.plan.recovery.copy_bandwidth
        return Copier(
            self._job.program,
            assigned.index,
            self._queues,
            store,
            self._progress.copies,
            run=assigned.run,
            incarnation=assigned.incarnation,
            bandwidth=Bandwidth(limit, monotonic),
        )

    def _wake(self) -> None:
        if self._ready:
            self._loop.attend()
        self._queues.ring()

    def _announced(self) -> Iterable[Announced]:
        return self._commands.announced() if self._ready else ()

    def _make_room(self, reason: str) -> None:
        """Note that a `put` waits for room, and handle commands: a trim makes room."""
        if self._progress.full is None:
            log.warning("waiting", reason=reason)
        self._loop.lacks_room()
        self._commands.handle()

    def _serve(self, seconds: float) -> None:
        """Wait for a disk for `seconds`, and go on serving the other workers and the broker."""
        until = monotonic() + seconds
        self._queues.pump(0)
        while (left := until - monotonic()) > 0:
            self._queues.pump(left)
            if self._ready:
                self._commands.handle()

    def _save_checkpoint(self, folder: Path, position: Position) -> None:
        """Save a checkpoint that a script has called for. How that went is no reply: repeated, it may go otherwise."""
        save_stages(folder, self._job.plan, self._assigned, self._stages, position.step, self._progress)

    def _save(self) -> SavedWeights:
        for feature in self._features:
            feature.finish()
        note = self._progress.noting("weights")
        return save_weights(self._stages, self._folder, note, self._serve), copies_in(self._stages.values())

    def _open_queues(self, folder: Path) -> WorkerQueues:
        """Return the worker's queues.

        If they cannot be opened, the run fails, since a replacement could do no better. In two cases the worker only
        gives its place back: a predecessor that hangs still has the address, or this machine is not the place's own.
        """
        job, assigned = self._job, self._assigned
        try:
            return open_queues(job.plan, job.program, assigned, folder, self._make_room, pair=self._options.pair)
        except (BrokerError, OSError) as error:  # OSError: a name that cannot be resolved
            reason = f"its queues cannot be opened: {error}"
            later_free = isinstance(error, EndpointTaken) and assigned.step > 0
            self._control.send(
                Goodbye(assigned.incarnation, reason)
                if later_free or self._options.standing_in
                else Failed(assigned.incarnation, reason, ExitCode.FAILED)
            )
            raise
