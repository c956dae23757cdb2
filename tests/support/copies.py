"""A worker's ends of transfers of snapshots, made in one line."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic

from stageline.broker.queues.base import WorkerQueues
from stageline.pipeline.program import Program
from stageline.workers.checkpoint.copier import Bandwidth, Copier
from stageline.workers.checkpoint.copies import CopyStore, DiskCopies
from stageline.workers.checkpoint.directory import SnapshotDirectory
from stageline.workers.checkpoint.snapshot import Origin
from stageline.workers.runtime.copy_progress import CopyProgress

NOWHERE = Path("there is no such folder")


def copier_of(
    program: Program,
    queues: WorkerQueues,
    place: int = 0,
    *,
    store: CopyStore | None = None,
    progress: CopyProgress | None = None,
    limit: float | None = None,
    now: Callable[[], float] = monotonic,
) -> Copier:
    """Of a worker whose program has no queues for copies, unless a pass has added them."""
    store = store or DiskCopies(SnapshotDirectory(NOWHERE, Origin("run", "")))
    bandwidth, progress = Bandwidth(limit, now), progress or CopyProgress()
    return Copier(program, place, queues, store, progress, run="run", incarnation=1 + place, bandwidth=bandwidth)
