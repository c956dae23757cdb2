"""Bytes that each worker's process takes at most, and that queues carry and keep, from one tried microbatch; limits.

A plan that chooses its schedule lists those that accept its placement, and for which its workers have room.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from math import ceil

from stageline.broker.queues.log import SPILL
from stageline.pipeline.features.offload import AHEAD
from stageline.pipeline.plan import PlanError
from stageline.pipeline.program import Queue, check_schedule
from stageline.pipeline.schedule import Schedule, ScheduleRefused, make_schedule, schedule_names
from stageline.workers.disk.memory import BACKLOG
from stageline.workers.extras.fitting import StageLoad, WorkerRoom
from stageline.workers.extras.fitting.memory_load import ample_limit_for, limit_for
from stageline.workers.runtime.job import Job

from .dry_run import Carried
from .trial_result import QueueEstimate, ScheduleEstimate, StageEstimate, WorkerEstimate

_SAVED = ("weights", "optimizer", "averages")  # what a snapshot copies of what a stage holds


def worker_estimates(
    job: Job, stages: Sequence[StageEstimate], queues: Sequence[QueueEstimate]
) -> list[WorkerEstimate]:
    """Return the estimates of the workers, in order.

    Args:
        job: Plan and schedule.
        stages: Estimates of the model's stages, then of their further replicas.
        queues: Estimates of the queues.
    """
    found = []
    for worker, room in enumerate(worker_rooms(job, stages, queues)):
        own, tight = [stages[stage] for stage in job.plan.placement[worker]], job.plan.is_tight(worker)
        load, plain = (_worker_load(job, own, waits=waits) for waits in (tight, False))
        ample = None if room.limit is None else ample_limit_for(room.peak(plain))
        found.append(WorkerEstimate(worker, room.parts(load), room.peak(load), room.limit, tight, ample))
    return found


def worker_rooms(job: Job, stages: Sequence[StageEstimate], queues: Sequence[QueueEstimate]) -> list[WorkerRoom]:
    """Return for each worker its limit and the bytes that it takes besides its stages.

    Args:
        job: Plan and schedule.
        stages: Estimates of the model's stages, then of their further replicas.
        queues: Estimates of the queues.
    """
    model = 0 if job.plan.loads_weights else sum(each.bytes["weights"] for each in stages[: job.schedule.stages])
    own = [[stages[stage] for stage in placed] for placed in job.plan.placement]
    return [
        WorkerRoom(_messages(job, each, queues), model, BACKLOG + AHEAD, job.plan.limit_of(worker))
        for worker, each in enumerate(own)
    ]


def stage_load(job: Job, stage: StageEstimate, offload: Collection[str], *, waits: bool) -> StageLoad:
    """Return the bytes that a stage takes of its worker.

    Args:
        job: Plan and schedule.
        stage: Estimate of the stage.
        offload: Parts of the stage in files.
        waits: The worker does nothing else while a snapshot is written, so the snapshot's copy reuses the memory that
            the update before it has cleared.
    """
    in_files = stage.with_files(offload)
    copied = _copied(job, offload, stage)
    return StageLoad(
        held=stage.total - in_files.offloaded - in_files.in_files,
        working=max(stage.working, copied - _cleared(job, in_files)) if waits else stage.working,
        copied=0 if waits else copied,
        offloaded=in_files.offloaded,
    )


def limit_key(job: Job, worker: int) -> str:
    """Return the name of the plan's key that sets the memory limit of `worker`."""
    return "memory.limit" if job.plan.workers[worker].memory is None else f"workers.{worker}.memory"


def refusals(
    job: Job, stages: Sequence[StageEstimate], queues: Sequence[QueueEstimate], workers: Sequence[WorkerEstimate]
) -> Iterator[PlanError]:
    """Yield each reason why the run has no room: for messages, stages, the first schedule, workers.

    Args:
        job: Plan and schedule.
        stages: Estimates of the model's stages, then of their further replicas.
        queues: Estimates of the queues.
        workers: Estimates of the workers.
    """
    yield from _overflows(job, queues)
    limit = job.plan.model.stage_memory
    for stage in stages:
        if limit is not None and stage.group == 1 and stage.total > limit:  # of a group that is not known
            yield PlanError(
                "model.stage_memory",
                f"stage {stage.stage}, of layers {stage.layers[0]} to {stage.layers[-1]}, takes {stage.total} bytes; "
                f"raise the limit, cut elsewhere, or leave model.cut out, to be cut so that stages fit",
                value=str(limit),
            )
    limit = job.plan.schedule.memory
    taken = 0 if limit is None else _room(job.schedule, stages)[1]
    if limit is not None and taken > limit:  # the schedule that a run begins with holds the fewest microbatches
        yield PlanError(
            "schedule.memory",
            f"a worker takes {taken} bytes with {job.schedule.name}, with which the run begins, and which holds the "
            f'fewest microbatches that keep every worker busy. Use "{-(-taken // 2**20)}MiB" or more, more stages, or '
            f'smaller microbatches; or name = "window" with fewer of them in flight',
            value=str(limit),
        )
    for each in workers:
        if each.limit is not None and each.total > each.limit:
            placed = ", ".join(str(job.schedule.label(stage)) for stage in job.plan.placement[each.worker])
            yield PlanError(
                limit_key(job, each.worker),
                f"worker {each.worker} would take {each.total} bytes with what the plan says of stages {placed}. Use "
                f'"{-(-limit_for(each.total) // 2**20)}MiB" or more, or leave recompute and offload to be chosen',
                value=str(each.limit),
            )


def choosable(job: Job, stages: Sequence[StageEstimate]) -> Iterator[ScheduleEstimate]:
    """Yield every schedule of the catalogue except the window, with the reason why it cannot be taken, if any.

    The window is made as large as the links need and memory allows. The run measures how long the halves of a backward
    take.
    """
    limit = job.plan.schedule.memory or 0
    placement, first = job.schedule.placement, job.schedule.first_trainable
    for name in schedule_names():
        if name == "window":
            continue
        try:
            made = make_schedule(name, placement, job.schedule.microbatches, first_trainable=first)
        except ScheduleRefused as refused:
            yield ScheduleEstimate(name, (), 0, refused.reason)
            continue
        in_flight, taken = _room(made, stages)
        reason = "" if taken <= limit else "takes more than schedule.memory"
        halves = made.halves_backwards
        yield ScheduleEstimate(name, in_flight, taken, (_unsplit(stages) if halves else "") or reason, halves)


def spills(job: Job, queues: Sequence[QueueEstimate]) -> Iterator[str]:
    """Yield a warning for each worker whose messages exceed its memory for messages; the rest goes to the disk."""
    limit = job.plan.queues.retain_bytes
    for worker, needed in enumerate(_by_worker(job, queues)):
        if needed > limit:
            yield (
                f"worker {worker} keeps {needed} bytes of messages, {limit} of them in memory, the rest on disk. Use "
                f'queues.retain_bytes = "{ceil(needed / 2**20)}MiB" or more if there is memory for it.'
            )


def queue_estimates(job: Job, messages: Mapping[str, Carried]) -> list[QueueEstimate]:
    """Return the estimates of the queues, ordered by flow, target and name.

    Args:
        job: Plan and schedule.
        messages: Size of one message, by queue.
    """
    queues = sorted(
        (job.program.queues[name] for name in messages), key=lambda queue: (queue.flow, queue.target, queue.name)
    )
    return [_estimate(job, queue, messages[queue.name]) for queue in queues]


def _room(schedule: Schedule, stages: Sequence[StageEstimate]) -> tuple[tuple[int, ...], int]:
    """Return the microbatches in flight by stage, and the bytes of the worker that takes most."""
    verdict = check_schedule(schedule)
    peaks, halfway = verdict.stage_peak, verdict.halfway_peak
    return peaks, max(
        sum(stages[n].with_in_flight(peaks[n]).total + (stages[n].halfway or 0) * halfway[n] for n in owned)
        for owned in schedule.placement
    )


def _unsplit(stages: Sequence[StageEstimate]) -> str:
    """Return why some stage cannot split a backward; "" if all can."""
    whole = [str(each.stage) for each in stages if each.halfway is None]
    if not whole:
        return ""
    named = f"stage {whole[0]}" if len(whole) == 1 else f"stages {', '.join(whole)}"
    return f"splits backwards in two halves, and {named} cannot, since activations are recomputed there"


def _overflows(job: Job, queues: Sequence[QueueEstimate]) -> Iterator[PlanError]:
    """Yield an error for each worker without room for all messages since the last checkpoint and those of another step.

    Where snapshots are written, only a checkpoint lets messages go. A worker without room would wait for a checkpoint
    that no worker can reach.
    """
    plan = job.plan
    if plan.queues.in_one_process:
        return
    room = (1 + SPILL) * plan.queues.retain_bytes
    for worker, needed in enumerate(_by_worker(job, queues)):
        if needed > room:
            steps = max(_steps_kept(job, stage) for stage in job.schedule.placement[worker])
            every = plan.recovery.snapshot_every
            of = f"{steps} steps (recovery.snapshot_every is {every})" if plan.recovery.on else "one step"
            smaller = ", or a smaller recovery.snapshot_every" if plan.recovery.on else ""
            yield PlanError(
                "queues.retain_bytes",
                f"worker {worker} keeps the messages of {of}, {needed} bytes, and has room for {room} in memory and on "
                f'disk: it would wait for ever. Use "{ceil(needed / (1 + SPILL) / 2**20)}MiB" or more{smaller}',
                value=str(plan.queues.retain_bytes),
            )


def _by_worker(job: Job, queues: Sequence[QueueEstimate]) -> list[int]:
    """Return how many bytes of messages each worker keeps at most."""
    return [sum(queue.retained for queue in queues if queue.producer in stages) for stages in job.plan.placement]


def _worker_load(job: Job, own: Sequence[StageEstimate], *, waits: bool) -> StageLoad:
    """Return the load of one worker's stages `own`, offloaded as the plan says."""
    loads = (
        stage_load(job, each, job.plan.offloaded_of(job.schedule.replicas.stage(each.stage)), waits=waits)
        for each in own
    )
    return reduce(StageLoad.beside, loads)


def _copied(job: Job, offload: Collection[str], stage: StageEstimate) -> int:
    """Return the bytes of a snapshot's copy in memory."""
    if not job.plan.recovery.on or job.plan.queues.in_one_process or {"weights", "optimizer"} & {*offload}:
        return 0
    there = job.plan.workers[stage.worker].device != "cpu"  # versions on the CPU are never written to, and not copied
    return sum(stage.bytes[part] for part in (*_SAVED, *(["stashed_weights"] if there else [])))


def _cleared(job: Job, stage: StageEstimate) -> int:
    """Return the bytes of a stage that an update clears: gradients, and activations in memory or on their way to files.

    In asynchronous mode, microbatches are in flight during an update, so their activations stay. If the worker has
    other stages, those may use the way to files.
    """
    flushes = job.schedule.mode == "sync"
    stashed = (stage.bytes["activations"] - stage.offloaded) * flushes
    alone = flushes and len(job.plan.placement[stage.worker]) == 1
    return stage.bytes["gradients"] + stashed + min(stage.offloaded, BACKLOG + AHEAD) * alone


def _messages(job: Job, own: Sequence[StageEstimate], queues: Sequence[QueueEstimate]) -> int:
    """Return the bytes of messages of one worker.

    Activations in flight count with the stage that stashes them, not here.
    """
    numbers = {stage.stage: stage for stage in own}
    retained = 0
    for queue in queues:
        if queue.producer in numbers:
            stashed = numbers[queue.producer].in_flight if queue.queue.startswith("forward-") else 0
            retained += max(0, queue.retained - stashed * queue.message)
    waiting = sum(queue.message * queue.in_flight for queue in queues if queue.consumer in numbers)
    return min(retained, job.plan.queues.retain_bytes) + waiting


def _estimate(job: Job, queue: Queue, message: Carried) -> QueueEstimate:
    if queue.source is None or queue.target is None:
        raise ValueError(f"{queue.name} carries no results of a stage: it has no estimate")
    bound = job.verdict.queue_bound  # messages that are put and not yet taken; of a queue that is ahead, the credit is
    credit = min(queue.window or 0, job.steps * job.schedule.microbatches)
    return QueueEstimate(
        queue=queue.name,
        producer=queue.source,
        consumer=queue.target,
        message=message.bytes,
        passed_on=message.passed_on,
        in_flight=credit if queue.name in job.program.ahead else bound[queue.name],
        retained=message.bytes * queue.count * _steps_kept(job, queue.source),
        ends=f"{job.schedule.label(queue.source)} to {job.schedule.label(queue.target)}",
        codec=queue.codec,
    )


def _steps_kept(job: Job, stage: int) -> int:
    """Return the number of steps whose messages `stage` keeps at most.

    The next checkpoint is complete when all stages have reached it. The first stage is ahead of the last by less than a
    step; in asynchronous mode, by a microbatch for each stage. A forward-only stage may lead its successor by at most
    the credit window.
    """
    plan, microbatches, number = job.plan, job.schedule.microbatches, job.schedule.replicas.stage
    leads = (job.program.queues[name] for name in sorted(job.program.ahead & job.program.queues.keys()))
    granted = sum(ceil((each.window or 0) / microbatches) for each in leads if number(each.target or 0) > number(stage))
    if plan.queues.in_one_process or not plan.recovery.on:
        return min(1 + granted, job.steps)
    lead = 1 if job.schedule.mode == "sync" else max(1, ceil(job.program.last / microbatches))
    return min(plan.recovery.snapshot_every + lead + granted, job.steps)
