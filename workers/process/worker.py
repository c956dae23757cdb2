"""One worker with all that it works with, opened in order and closed in reverse.

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
from stageline.broker.queues.base import WorkerQueues
from stageline.pipeline.errors import (
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
from stageline.workers.checkpoint.hooks import Announced, open_snapshots
from stageline.workers.checkpoint.saved import save_stages, save_weights
from stageline.workers.checkpoint.snapshot import SnapshotDamaged
from stageline.workers.control.commands import CommandHandler, SavedWeights
from stageline.workers.control.control_thread import ControlThread
from stageline.workers.control.joining import Stopped
from stageline.workers.disk.background_writer import WriteFailed
from stageline.workers.runs import folder as runs
from stageline.workers.runs.metrics import MetricsNotWritten
from stageline.workers.runtime.calls import Position
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.losses import ComputeFailed
from stageline.workers.runtime.progress import Progress
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
    """All of it."""
    return reason


def withheld(error: BaseException, reason: str) -> str:
    """`reason` without the texts of what the user's code raised, which may show values: of a row, or a label."""
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
    """Reports to the broker why the work within ends early; what the user's own code raised as `explain` has it. Of
    each reason, what `texts` makes of it is sent.

    A worker that is interrupted ends the run, unless it can be `replaced`: then it only gives its place back. So does
    one whose queue end belongs to a newer incarnation: if the broker takes it for current, its records are old. So does
    one that leads a group of processes, if another of them is lost. So does one that lacks memory, or descriptors where
    the user's code needs them: a fresh process has its own.
    """
    try:
        yield
    except BaseException as error:  # whatever it was, the run must end with its reason
        leaves = isinstance(error, Stopped) and error.code == ExitCode.INTERRUPTED
        leaves = leaves or isinstance(error, Fenced | GroupLost) or lacks_resources(error)
        if (isinstance(error, Stopped) and error.broker_knows) or (leaves and replaced):
            control.send(Goodbye(incarnation, bounded(texts(error, why_it_leaves(error)))))
        else:
            reason, code = _cause(error, explain)
            control.send(Failed(incarnation, bounded(texts(error, reason)), code))
        raise


def lacks_resources(error: BaseException) -> bool:
    """Whether another process could do better. Not after a fault that was waited for did not pass, as on a disk."""
    if isinstance(error, WriteFailed | SnapshotDamaged | MetricsNotWritten | BrokerError):
        return lacks_memory(error)
    return passing_fault(error) is not None


def why_it_leaves(error: BaseException) -> str:
    """Why a worker gives its place back, for people."""
    if isinstance(error, Stopped | Fenced | GroupLost | ComputeFailed | DataError):
        return str(error)
    return f"lacks memory: {error}" if lacks_memory(error) else f"lacks resources: {error}"


def _cause(error: BaseException, explain: Callable[[ComputeFailed], str]) -> tuple[str, int]:
    """Why a worker ends, for people, and its exit code."""
    match error:
        case Stopped():
            return str(error), error.code
        case ComputeFailed():
            return explain(error), error.exit_code
        case SnapshotDamaged():
            return f"{error}. {RESUME_AS_A_WHOLE}", error.exit_code
        case StagelineError():
            return str(error), error.exit_code
        case KeyboardInterrupt():  # no signal: those end the loop between two actions
            return "the model, the data or a metric raised KeyboardInterrupt", ExitCode.FAILED
        case _ if lacks_resources(error):
            return why_it_leaves(error), ExitCode.FAILED
        case _:
            return f"a bug in stageline: {type(error).__name__}: {error}", ExitCode.FAILED


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker process is to behave. Times in seconds.

    `claim`: the worker of the plan it wants to be (None: any). `broker_timeout`: how long it looks for the broker.
    `workers_timeout`: how long it then waits for the other workers. `lifeline`: a pipe at
    whose end it exits, so that a killed supervisor leaves nothing behind (-1: none). `sockets`: the folder for its
    sockets (None: one of its own), which is cleared if it was killed. `spare`: it waits until another worker is lost.
    `joined`: its plan is that of a script on another machine, for which it writes files in `run.dir` alone.
    `command`: by which other workers of the plan are started here, where the plan wants that. `standing_in`: another
    worker has started this one, for the place of a lost replica: if it cannot do that, the run goes on without it.
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


class Worker:
    """A worker that has been `assigned` its place, ready to run; whatever it holds is closed with `stack`.

    Args:
        stack: Closes what the worker opens, also where opening it fails halfway.
        job: The run's, with this worker's stages.
        assigned: Its place.
        control: Its connection to the broker, on which it has not reported yet.
        options: Of its process.
        folder: For its sockets.
    """

    def __init__(
        self,
        stack: ExitStack,
        job: Job,
        assigned: Assigned,
        control: ControlThread,
        options: WorkerOptions,
        folder: Path,
    ) -> None:
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
        executor = job.executor(job.schedule.placement[assigned.index], make=groups.make)
        self._stages = executor.stages
        here, steps = reachable(queues.endpoint, options.broker), job.training_steps
        control.start(
            assigned, here, progress, steps=steps, wake=self._wake, where=lambda each: self._stages[each].where
        )
        self._folder = runs.folder(job.plan, assigned.run)
        names = assigned.index, assigned.run, assigned.incarnation, assigned.step
        place = WorkerPlace(job, self._folder, *names, executor, queues, progress, self._serve)
        self._features = features_of(place, stack.enter_context)
        if elastic_stages(job.plan) and options.command:
            stack.enter_context(StandIns(job.schedule, job.plan, assigned.index, options.broker, options.command))
        hooks = stack.enter_context(open_snapshots(place, assigned, self._features, self._announced))
        save = (lambda folder, position: None) if options.joined else self._save_checkpoint
        self._loop = loop_of(place, self._features, calls, keep=hooks.keep, save=save)
        self._commands = CommandHandler(assigned, control, queues, hooks, self._loop)
        self._ready = True

    def run(self) -> None:
        """Run to the end of the run. Raises `Stopped`, and whatever computing, the queues and the disk raise."""
        timeout, lease = self._options.workers_timeout, self._job.plan.recovery.lease
        self._commands.run(self._save, workers_timeout=timeout, lease=lease)

    def _wake(self) -> None:
        if self._ready:
            self._loop.attend()
        self._queues.ring()

    def _announced(self) -> Iterable[Announced]:
        return self._commands.announced() if self._ready else ()

    def _make_room(self, reason: str) -> None:
        """A `put` waits for room, which a trim makes."""
        if self._progress.full is None:
            log.warning("waiting", reason=reason)
        self._loop.lacks_room()
        self._commands.handle()

    def _serve(self, seconds: float) -> None:
        """Wait so long for a disk, and go on serving the other workers and the broker."""
        until = monotonic() + seconds
        self._queues.pump(0)
        while (left := until - monotonic()) > 0:
            self._queues.pump(left)
            if self._ready:
                self._commands.handle()

    def _save_checkpoint(self, folder: Path, position: Position) -> None:
        """A script calls for it."""
        save_stages(folder, self._job.plan, self._assigned, self._stages, position.step, self._progress)

    def _save(self) -> SavedWeights:
        for feature in self._features:
            feature.finish()
        note = self._progress.noting("weights")
        return save_weights(self._stages, self._folder, note, self._serve), copies_in(self._stages.values())

    def _open_queues(self, folder: Path) -> WorkerQueues:
        """The worker's queues. If they cannot be opened, the run fails, since a replacement could do no better; unless
        a predecessor that hangs still has the address, or this machine is not the place's own."""
        job, assigned = self._job, self._assigned
        try:
            return open_queues(job.plan, job.program, assigned, folder, self._make_room)
        except (BrokerError, OSError) as error:  # OSError: a name that cannot be resolved
            reason = f"its queues cannot be opened: {error}"
            later_free = isinstance(error, EndpointTaken) and assigned.step > 0
            self._control.send(
                Goodbye(assigned.incarnation, reason)
                if later_free or self._options.standing_in
                else Failed(assigned.incarnation, reason, ExitCode.FAILED)
            )
            raise
