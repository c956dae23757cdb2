"""The cache of the worker that has the first stage that trains, as it is when that worker begins.

at step 0             empty
at a checkpoint       what the first epoch's steps before it have kept; damaged, lost or of another run: computed again
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from stageline.pipeline.retry import Note
from stageline.pipeline.stage.stage import Stage
from stageline.workers.runs import folder as runs
from stageline.workers.runtime.job import Job

from .again import compute_again
from .cache import FOLDER, PrefixCache, require_numbering
from .header import parts_of

log = structlog.get_logger()


def open_prefix_cache(
    job: Job,
    worker: int,
    run: str,
    start: int = 0,
    *,
    stages: Mapping[int, Stage] | None = None,
    note: Note = lambda fault: None,
    going_on: Callable[[], object] = lambda: None,
) -> PrefixCache | None:
    """The cache as `worker` needs it from step `start` on; None if it needs none. `stages` are the worker's own.

    `going_on` is called now and then while it is computed again. Raises `PrefixCacheFailed` if it cannot be,
    `DataError` or `ModelRefused` if the data that say which samples a batch has cannot be read.
    """
    replayed_from = job.replayed_from
    first = job.schedule.first_trainable
    if replayed_from is None or first not in job.schedule.placement[worker]:
        return None
    told = job if job.numbering is not None else job.with_data()
    numbering = require_numbering(told.numbering)
    cache = PrefixCache(
        Path(runs.folder(job.plan, run)) / FOLDER,
        numbering,
        numbering.count(replayed_from),
        parts_of(job.plan, job.segments[first].first_layer),
    )
    cache.note = note
    steps = min(start, replayed_from)
    wrong = cache.open(steps) if steps else "the run begins"
    if wrong:
        cache.clear()
    if wrong and steps:
        log.warning("the prefix cache is computed again", folder=str(cache.folder), steps=steps, reason=wrong)
        for place, rows in compute_again(told, worker, steps, stages or {}, wrong):
            cache.keep(*place, rows)
            going_on()
        cache.sync()
    return cache
