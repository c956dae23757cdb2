"""The wait of a worker for snapshots that its disk lacks, before it can begin: other workers hold copies of them."""

from collections.abc import Callable, Sequence

import structlog

from stageline.broker.control.checkpoints import Copying
from stageline.broker.control.messages import Assigned, Peers, Refused, Stop
from stageline.broker.queues.base import WorkerQueues
from stageline.broker.queues.secrets import secrets_of
from stageline.pipeline.errors import failure_code
from stageline.pipeline.program import Program
from stageline.workers.checkpoint.copier import PATIENCE, Copier
from stageline.workers.runtime.progress import Progress

from .control_thread import ControlThread
from .joining import Stopped

Missing = tuple[int, int]  # stage and step

log = structlog.get_logger()


def await_snapshots(
    missing: Sequence[Missing],
    copier: Copier,
    control: ControlThread,
    queues: WorkerQueues,
    program: Program,
    progress: Progress,
    lost: Callable[[Missing], Exception],
) -> None:
    """Wait until the snapshots that are `missing` have come, and serve the other workers meanwhile.

    All commands but those about transfers are carried out again once the worker has begun.

    Args:
        missing: Snapshots that the worker begins with, and that are not on its disk.
        copier: Takes part in transfers.
        control: Has the broker's commands; it reports what is missing.
        queues: Queues of the worker.
        program: Program of the run.
        progress: Progress of the worker.
        lost: Returns the error for a snapshot that no other worker holds.

    Raises:
        Stopped: The run ends first, or this worker's part in it.
    """
    kept = []
    with progress.writing("snapshots that other workers hold are"):
        while left := [each for each in missing if not copier.store.has(*each)]:
            progress.copies.lack(left)
            while control.commands:
                command = control.commands.popleft()
                _obey(command, copier, queues, program)
                kept += [] if isinstance(command, Copying) else [command]
            copier.turn()
            if gone := copier.lost.intersection(left):
                raise lost(min(gone))
            queues.pump(PATIENCE)
    control.commands.extendleft(reversed(kept))
    progress.copies.lack(())
    if missing:
        log.info(f"restored snapshots from copies that other workers hold: stages {[stage for stage, _ in missing]}")


def _obey(command: object, copier: Copier, queues: WorkerQueues, program: Program) -> None:
    match command:
        case Assigned() as place:
            queues.rekey(secrets_of(program.queues.values(), place))
        case Peers(workers):
            queues.admit(max(incarnation for incarnation, _ in workers.values()))
            copier.meet(workers)
        case Copying() as told:
            copier.order(told)
        case Stop(reason, code) | Refused(reason, code):
            raise Stopped(reason, failure_code(code), broker_knows=True)
        case Stopped() as stopped:
            raise stopped
