"""The prefix cache of the worker that has the first stage that trains, as that worker begins.

at step 0             empty
at a checkpoint       the rows that the first epoch's steps before it kept; damaged, lost or of another run: computed
                      again, in this worker

Frozen stages are the same in any process, and their forwards draw no random numbers. So the same microbatches give the
same bits, if this worker can read the data, and the weights of those stages where they are in files.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import structlog
import torch

from stageline.broker.codec.codecs import Codec
from stageline.broker.codec.tensors import delivered
from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.feature import Compute
from stageline.pipeline.plan import PlanRefused
from stageline.pipeline.program import CacheUse, Instruction, Program
from stageline.pipeline.schedule import Action, Kind
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.tree import Tree
from stageline.workers.runtime.executor import Executor
from stageline.workers.runtime.job import Job
from stageline.workers.runtime.losses import ComputeFailed
from stageline.workers.runtime.worker_feature import WorkerFeature, WorkerPlace

from .cache import FOLDER, PrefixCache, PrefixCacheFailed, require_numbering
from .header import parts_of

log = structlog.get_logger()


def compute_again(
    job: Job, worker: int, steps: int, stages: Mapping[int, Stage], reason: str
) -> Iterator[tuple[tuple[int, int], Tree]]:
    """Yield the output of the frozen first stages for each microbatch of the first `steps` steps, after its place.

    The place is a pair of step and microbatch.

    Args:
        job: Plan, model and data.
        worker: Number of this worker, for errors.
        steps: Number of steps.
        stages: Stages that this worker has already, by number.
        reason: Why the cache cannot be used, for errors.

    Raises:
        PrefixCacheFailed: The data, the weights or the model of the frozen stages are not available here.
    """
    try:
        yield from _computed(job, steps, stages)
    except (ModelRefused, DataError, PlanRefused, ComputeFailed) as error:
        raise PrefixCacheFailed(
            f"the prefix cache cannot be used: {reason}. It cannot be computed again here: {error}. Bring its folder "
            f"back, or resume where worker {worker} can read the data and the weights of stages 0 to "
            f"{job.schedule.first_trainable - 1}, or begin another run"
        ) from None


def _computed(job: Job, steps: int, stages: Mapping[int, Stage]) -> Iterator[tuple[tuple[int, int], Tree]]:
    loaded = job if job.own_feed is not None else job.with_data()
    prefix = range(job.schedule.first_trainable)
    program = loaded.program
    missing = [stage for stage in prefix if stage not in stages]
    executor = loaded.executor(prefix, make=lambda stage, _: stages[stage] if stage in stages else loaded.stage(stage))
    places = ((step, microbatch) for step in range(steps) for microbatch in range(job.schedule.microbatches))
    with _threads_kept():
        for place in places:
            yield place, _forward(loaded, program, executor, prefix, *place)
    for stage in missing:
        job.segments[stage].unload()


def _forward(job: Job, program: Program, executor: Executor, prefix: Sequence[int], step: int, microbatch: int) -> Tree:
    output: Tree = None
    for stage in prefix:
        torch.set_num_threads(job.plan.workers[job.schedule.owner(stage)].threads)  # bits may follow it
        instruction = program.instruction(step, Action(Kind.FORWARD, stage, microbatch))
        output = executor.carry_out(instruction, [output] if stage else [])
        codec = Codec[program.queues[f"forward-{stage + 1}"].codec.upper()]
        output = output if codec is Codec.LOSSLESS else delivered(output, codec)
    return output


@contextmanager
def _threads_kept() -> Iterator[None]:
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class PrefixCaching(WorkerFeature):
    """Feature that keeps and replays the output of the frozen first stages, around forwards of the stage `first`."""

    name = "prefix cache"

    def __init__(self, cache: PrefixCache, first: int) -> None:
        """Create the feature for `first`, the first stage that trains."""
        self._cache = cache
        self._first = first

    def around(self, stage: Stage, kind: str, compute: Compute) -> Compute:
        """Return `compute`, wrapped for forwards of the first stage that trains: marked rows are kept or replayed.

        Args:
            stage: Stage that is computed.
            kind: Kind of its actions.
            compute: Function that carries out an instruction.
        """
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
        """Return once all rows that were kept are on the disk."""
        self._cache.sync()

    def cached_input(self, instruction: Instruction) -> Tree:
        """Return the replayed rows for a forward of the first stage that trains; None for other instructions."""
        if instruction.action.stage != self._first or CacheUse.REPLAYED not in instruction.op.marks:
            return None
        return self._cache.rows(instruction.step, instruction.action.microbatch)


def prefix_cache(place: WorkerPlace) -> PrefixCaching | None:
    """Return the cache for the worker at `place`; None if that worker needs none. Takes long if the cache is lost.

    Raises:
        PrefixCacheFailed: The cache cannot be made.
        DataError: The data that give the samples of a batch cannot be read.
        ModelRefused: The data source cannot be made.
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
