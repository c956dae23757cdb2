"""What the queues of a run carry and keep, from the messages of one microbatch."""

from collections.abc import Mapping
from math import ceil

from stageline.broker.codec.codecs import Codec
from stageline.broker.queues.base import QueueKey
from stageline.workers.extras.preflight.dry_run import Carried
from stageline.workers.extras.preflight.trial_result import QueueEstimate
from stageline.workers.runtime.job import Job


def queue_estimates(job: Job, messages: Mapping[QueueKey, Carried]) -> list[QueueEstimate]:
    """By queue, in order of their names."""
    ordered = sorted(messages.items(), key=lambda each: (each[0].wire, str(each[0])))
    return [_estimate(job, key, message) for key, message in ordered]


def _estimate(job: Job, key: QueueKey, message: Carried) -> QueueEstimate:
    source = job.program.queues.table[key].source
    if source is None:
        raise ValueError(f"{key} carries no results of a stage: it has no estimate")
    return QueueEstimate(
        queue=str(key),
        producer=source,
        consumer=key.stage,
        message=message.bytes,
        passed_on=message.passed_on,
        in_flight=_in_flight(job, key),
        retained=message.bytes * key.per_step(job.schedule.microbatches) * steps_kept(job, source),
        ends=f"{job.schedule.label(source)} to {job.schedule.label(key.stage)}",
        codec=job.codecs.get(key, Codec.LOSSLESS).name.lower(),
    )


def steps_kept(job: Job, stage: int) -> int:
    """How many steps' messages `stage` keeps at most: the next checkpoint is complete when all stages have come to it,
    and the first stage is ahead of the last by less than a step; in asynchronous mode, by a microbatch for each stage.
    One that runs forward only is ahead of the next by what that one grants."""
    plan, microbatches, number = job.plan, job.schedule.microbatches, job.schedule.replicas.stage
    granted = [ceil(job.windows()[key] / microbatches) for key in _ahead(job) if number(key.stage) > number(stage)]
    if plan.queues.in_one_process or not plan.recovery.on:
        return min(1 + sum(granted), job.steps)
    ahead = 1 if job.schedule.mode == "sync" else max(1, ceil(job.program.last / microbatches))
    return min(plan.recovery.snapshot_every + ahead + sum(granted), job.steps)


def _in_flight(job: Job, key: QueueKey) -> int:
    """The messages of a queue that are put and not yet taken, at most: what the schedule allows, or the credit."""
    if str(key) not in job.schedule.ahead:
        return job.verdict.queue_bound[str(key)]
    return min(job.windows()[key], job.steps * job.schedule.microbatches)


def _ahead(job: Job) -> list[QueueKey]:
    return [key for key in job.program.queues.all if str(key) in job.schedule.ahead]
