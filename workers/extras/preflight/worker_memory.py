"""Bytes that each worker's process takes at most, and that queues carry and keep, from one tried microbatch."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from math import ceil

from stageline.pipeline.features.offload import AHEAD
from stageline.pipeline.plan import PlanError
from stageline.pipeline.program import Queue
from stageline.workers.disk.memory import BACKLOG
from stageline.workers.extras.fitting import StageLoad, WorkerRoom
from stageline.workers.extras.fitting.load import ample_limit_for, limit_for
from stageline.workers.runtime.job import Job

from .dry_run import Carried
from .trial_result import QueueEstimate, StageEstimate, WorkerEstimate

_SAVED = ("weights", "optimizer", "averages")  # what a snapshot copies of what a stage holds


def worker_estimates(
    job: Job, stages: Sequence[StageEstimate], queues: Sequence[QueueEstimate]
) -> list[WorkerEstimate]:
    """In the order of the workers. `stages` are those of the model, then their further replicas."""
    found = []
    for worker, room in enumerate(worker_rooms(job, stages, queues)):
        own, tight = [stages[stage] for stage in job.plan.placement[worker]], job.plan.is_tight(worker)
        load, plain = (_worker_load(job, own, waits=waits) for waits in (tight, False))
        ample = None if room.limit is None else ample_limit_for(room.peak(plain))
        found.append(WorkerEstimate(worker, room.parts(load), room.peak(load), room.limit, tight, ample))
    return found


def worker_rooms(job: Job, stages: Sequence[StageEstimate], queues: Sequence[QueueEstimate]) -> list[WorkerRoom]:
    """What each worker takes besides its stages, and how much it may take."""
    model = 0 if job.plan.loads_weights else sum(each.bytes["weights"] for each in stages[: job.schedule.stages])
    own = [[stages[stage] for stage in placed] for placed in job.plan.placement]
    return [
        WorkerRoom(_messages(job, each, queues), model, BACKLOG + AHEAD, job.plan.limit_of(worker))
        for worker, each in enumerate(own)
    ]


def stage_load(job: Job, stage: StageEstimate, offload: Collection[str], *, waits: bool) -> StageLoad:
    """What a stage takes of its worker that has `offload` in files. One that `waits` does nothing else while a
    snapshot is written: the copy is not beside what the update before it has cleared."""
    in_files = stage.with_files(offload)
    copied = _copied(job, offload, stage)
    return StageLoad(
        held=stage.total - in_files.offloaded - in_files.in_files,
        working=max(stage.working, copied - _cleared(job, in_files)) if waits else stage.working,
        copied=0 if waits else copied,
        offloaded=in_files.offloaded,
    )


def over_limit(job: Job, workers: Sequence[WorkerEstimate]) -> Iterator[PlanError]:
    """The workers that would take more than they may, whatever was said of their stages."""
    for each in workers:
        if each.limit is not None and each.total > each.limit:
            stages = ", ".join(str(job.schedule.label(stage)) for stage in job.plan.placement[each.worker])
            yield PlanError(
                limit_key(job, each.worker),
                f"worker {each.worker} would take {each.total} bytes with what the plan says of stages {stages}. Use "
                f'"{-(-limit_for(each.total) // 2**20)}MiB" or more, or leave recompute and offload to be chosen',
                value=str(each.limit),
            )


def limit_key(job: Job, worker: int) -> str:
    """The key that says how much it may take."""
    return "memory.limit" if job.plan.workers[worker].memory is None else f"workers.{worker}.memory"


def _worker_load(job: Job, own: Sequence[StageEstimate], *, waits: bool) -> StageLoad:
    """What the stages of one worker take, with what the plan says of them."""
    offloads = (job.plan.offloaded_of(job.schedule.replicas.stage(each.stage)) for each in own)
    return reduce(
        StageLoad.beside,
        (stage_load(job, each, offload, waits=waits) for each, offload in zip(own, offloads, strict=True)),
    )


def _copied(job: Job, offload: Collection[str], stage: StageEstimate) -> int:
    """What a snapshot takes, if its copy is in memory."""
    if not job.plan.recovery.on or job.plan.queues.in_one_process or {"weights", "optimizer"} & {*offload}:
        return 0
    there = job.plan.workers[stage.worker].device != "cpu"  # versions on the CPU are never written to, and not copied
    return sum(stage.bytes[part] for part in (*_SAVED, *(["stashed_weights"] if there else [])))


def _cleared(job: Job, stage: StageEstimate) -> int:
    """What of a stage is not there after an update: gradients, and what is stashed, in memory and on its way to files.
    In asynchronous mode, microbatches are in flight then; other stages of the worker may use the way to files."""
    stashed = 0 if job.schedule.mode == "async" else stage.bytes["activations"] - stage.offloaded
    alone = job.schedule.mode != "async" and len(job.plan.placement[stage.worker]) == 1
    return stage.bytes["gradients"] + stashed + (min(stage.offloaded, BACKLOG + AHEAD) if alone else 0)


def _messages(job: Job, own: Sequence[StageEstimate], queues: Sequence[QueueEstimate]) -> int:
    """Activations that are in flight count with the stage that has them stashed, not here."""
    numbers = {stage.stage: stage for stage in own}
    retained = 0
    for queue in queues:
        if queue.producer in numbers:
            stashed = numbers[queue.producer].in_flight if queue.queue.startswith("forward-") else 0
            retained += max(0, queue.retained - stashed * queue.message)
    waiting = sum(queue.message * queue.in_flight for queue in queues if queue.consumer in numbers)
    return min(retained, job.plan.queues.retain_bytes) + waiting


def queue_estimates(job: Job, messages: Mapping[str, Carried]) -> list[QueueEstimate]:
    """By queue, in order of their names."""
    queues = sorted(
        (job.program.queues[name] for name in messages), key=lambda queue: (queue.flow, queue.target, queue.name)
    )
    return [_estimate(job, queue, messages[queue.name]) for queue in queues]


def _estimate(job: Job, queue: Queue, message: Carried) -> QueueEstimate:
    if queue.source is None or queue.target is None:
        raise ValueError(f"{queue.name} carries no results of a stage: it has no estimate")
    return QueueEstimate(
        queue=queue.name,
        producer=queue.source,
        consumer=queue.target,
        message=message.bytes,
        passed_on=message.passed_on,
        in_flight=_in_flight(job, queue),
        retained=message.bytes * queue.count * steps_kept(job, queue.source),
        ends=f"{job.schedule.label(queue.source)} to {job.schedule.label(queue.target)}",
        codec=queue.codec,
    )


def steps_kept(job: Job, stage: int) -> int:
    """How many steps' messages `stage` keeps at most: the next checkpoint is complete when all stages have come to it,
    and the first stage is ahead of the last by less than a step; in asynchronous mode, by a microbatch for each stage.
    A stage that runs forward only is ahead of the next by what that one grants."""
    plan, microbatches, number = job.plan, job.schedule.microbatches, job.schedule.replicas.stage
    ahead = (job.program.queues[name] for name in job.program.queues if name in job.program.ahead)
    granted = [
        ceil(queue.window / microbatches)
        for queue in ahead
        if queue.target is not None and number(queue.target) > number(stage)
    ]
    if plan.queues.in_one_process or not plan.recovery.on:
        return min(1 + sum(granted), job.steps)
    lead = 1 if job.schedule.mode == "sync" else max(1, ceil(job.program.last / microbatches))
    return min(plan.recovery.snapshot_every + lead + sum(granted), job.steps)


def _in_flight(job: Job, queue: Queue) -> int:
    """The messages of a queue that are put and not yet taken, at most: what the schedule allows, or the credit."""
    if queue.name not in job.program.ahead:
        return job.verdict.queue_bound[queue.name]
    return min(queue.window, job.steps * job.schedule.microbatches)
