"""The cache of the worker that has the first stage that trains, as it is when that worker begins.

at step 0             empty
at a checkpoint       what the first epoch's steps before it have kept; damaged, lost or of another run: computed again
"""

from collections.abc import Sequence

import structlog

from stageline.pipeline.feature import Compute
from stageline.pipeline.program import CacheUse, Instruction
from stageline.pipeline.schedule import Kind
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.worker_feature import WorkerFeature, WorkerPlace

from .again import compute_again
from .cache import FOLDER, PrefixCache, require_numbering
from .header import parts_of

log = structlog.get_logger()


class PrefixCaching(WorkerFeature):
    """Keeps what comes from the frozen first stages, and gives it again, around the forwards of the stage `first`."""

    name = "prefix cache"

    def __init__(self, cache: PrefixCache, first: int) -> None:
        self._cache = cache
        self._first = first

    def around(self, stage: Stage, kind: str, compute: Compute) -> Compute:
        if stage.index != self._first or kind != Kind.FORWARD:
            return compute

        def with_rows(instruction: Instruction, received: Sequence[Tree]) -> Tree:
            place = instruction.step, instruction.action.microbatch
            if CacheUse.KEPT in instruction.op.marks:
                self._cache.keep(*place, received[0])
            elif CacheUse.REPLAYED in instruction.op.marks:
                received = [self._cache.rows(*place)]
            return compute(instruction, received)

        return with_rows

    def settle(self, stage: int) -> None:
        self._cache.sync()

    def cached_input(self, instruction: Instruction) -> Tree:
        if instruction.action.stage != self._first or CacheUse.REPLAYED not in instruction.op.marks:
            return None
        return self._cache.rows(instruction.step, instruction.action.microbatch)


def prefix_cache(place: WorkerPlace) -> PrefixCaching | None:
    """Return the cache as the worker at `place` needs it; None if it needs none. Takes long if the cache is lost.

    Raises `PrefixCacheFailed` if it cannot be made, `DataError` or `ModelRefused` if the data that say which samples a
    batch has cannot be read.
    """
    job, replayed_from, first = place.job, place.job.replayed_from, place.job.schedule.first_trainable
    if replayed_from is None or first not in job.schedule.placement[place.worker]:
        return None
    told = job if job.numbering is not None else job.with_data()
    numbering = require_numbering(told.numbering)
    cache = PrefixCache(
        place.folder / FOLDER,
        numbering,
        numbering.count(replayed_from),
        parts_of(job.plan, job.segments[first].first_layer),
        note=place.progress.noting("prefix cache"),
        wait=place.serve,
    )
    steps = min(place.start, replayed_from)
    wrong = cache.open(steps) if steps else "the run begins"
    if wrong:
        cache.clear()
    if wrong and steps:
        log.warning("the prefix cache is computed again", folder=str(cache.folder), steps=steps, reason=wrong)
        for at, rows in compute_again(told, place.worker, steps, place.executor.stages, wrong):
            cache.keep(*at, rows)
            place.serve(0)
        cache.sync()
    return PrefixCaching(cache, first)
