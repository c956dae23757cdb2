"""What the queues of a run carry and keep, from the messages of one microbatch."""

from collections.abc import Mapping
from math import ceil

from stageline.pipeline.program import Queue
from stageline.workers.extras.preflight.dry_run import Carried
from stageline.workers.extras.preflight.trial_result import QueueEstimate
from stageline.workers.runtime.job import Job


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
    if plan.queues.url == "memory://" or not plan.recovery.on:
        return min(1 + sum(granted), job.steps)
    lead = 1 if job.schedule.mode == "sync" else max(1, ceil(job.program.last / microbatches))
    return min(plan.recovery.snapshot_every + lead + sum(granted), job.steps)


def _in_flight(job: Job, queue: Queue) -> int:
    """The messages of a queue that are put and not yet taken, at most: what the schedule allows, or the credit."""
    if queue.name not in job.program.ahead:
        return job.verdict.queue_bound[queue.name]
    return min(queue.window, job.steps * job.schedule.microbatches)
