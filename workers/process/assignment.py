"""What a worker does from its assignment to the end of the run, and how it reports that it ends early.

wait for the other workers -> run the program -> save the weights -> Finished -> serve the others until Stop
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stageline.broker.control.protocol import Assigned, Failed, Finished, Goodbye
from stageline.broker.errors import BrokerError
from stageline.pipeline.data.source import DataError
from stageline.pipeline.digest import TensorDigest
from stageline.pipeline.errors import ExitCode, ForeignState
from stageline.workers.checkpoint.directory import SnapshotFailed
from stageline.workers.checkpoint.hooks import CheckpointHooks
from stageline.workers.checkpoint.snapshot import SnapshotDamaged
from stageline.workers.control.commands import CommandHandler
from stageline.workers.control.control_thread import ControlThread
from stageline.workers.control.session import Stopped
from stageline.workers.runtime.executor import ComputeFailed
from stageline.workers.runtime.loop import WorkerLoop

RESUME_AS_A_WHOLE = (
    "The other stages do not go back for one of them: resume the run as a whole (--resume), and all begin at an older "
    "checkpoint, if there is one that is not damaged"
)


def run_assignment(
    assigned: Assigned,
    control: ControlThread,
    commands: CommandHandler,
    loop: WorkerLoop,
    hooks: CheckpointHooks,
    save: Callable[[], dict[str, TensorDigest]],
    *,
    workers_timeout: float,
    lease: float,
) -> None:
    """Returns when the run has finished. `save` writes the weights and gives their digests. Times in seconds.

    Raises `Stopped`, and what computing, the queues and the snapshots raise.
    """
    commands.set_queues_to(assigned.step)
    commands.wait_for_workers(workers_timeout)
    loop.run(commands.handle, hooks.stepped)
    digests = save()
    hooks.flush()
    control.send(Finished(assigned.incarnation, digests))
    commands.serve_until_stopped(lease)


@contextmanager
def failures_reported(
    control: ControlThread, incarnation: int, explain: Callable[[ComputeFailed], str], *, replaced: bool
) -> Iterator[None]:
    """Reports to the broker why the work within ends early; what the user's own code raised as `explain` has it.

    A worker that is interrupted ends the run, unless it can be `replaced`: then it only gives its place back.
    """
    try:
        yield
    except ComputeFailed as error:
        control.send(Failed(incarnation, explain(error), ExitCode.FAILED))
        raise
    except SnapshotDamaged as damage:
        control.send(Failed(incarnation, f"{damage}. {RESUME_AS_A_WHOLE}", ExitCode.FAILED))
        raise
    except (BrokerError, DataError, SnapshotFailed, ForeignState) as error:
        code = ExitCode.REFUSED if isinstance(error, DataError) else ExitCode.FAILED
        control.send(Failed(incarnation, str(error), code))
        raise
    except Stopped as stop:
        leaves = stop.told or (stop.code == ExitCode.INTERRUPTED and replaced)
        control.send(Goodbye(incarnation, str(stop)) if leaves else Failed(incarnation, str(stop), stop.code))
        raise
    except BaseException as bug:  # the run must end, and say why, whatever it was
        control.send(Failed(incarnation, f"a bug in stageline: {type(bug).__name__}: {bug}", ExitCode.FAILED))
        raise
