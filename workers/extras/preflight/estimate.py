"""What a plan comes to before it runs: the split, memory by stage, bytes by queue, idle time; or why it cannot work.

One microbatch is trained by all stages in this process, with an update and the metrics: errors of a user's model, loss,
optimizer or metric show here, before the run begins. The bytes that stages and messages take are measured on the way.

A plan that chooses its schedule lists those that accept its placement, and for which its workers have room.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from math import ceil

from stageline.broker.queues.log import SPILL
from stageline.pipeline.errors import DataError
from stageline.pipeline.plan import Plan, PlanError, PlanRefused
from stageline.pipeline.program import check_schedule
from stageline.pipeline.schedule import Schedule, ScheduleRefused, make_schedule, schedule_names
from stageline.workers.runtime.job import Job, prepare

from .dry_run import UNWATCHED, TrialWatch, dry_run, further_copies
from .pure_prefix import try_prefix
from .trial_result import Estimate, QueueEstimate, ScheduleEstimate, StageEstimate
from .worker_memory import over_limit, queue_estimates, steps_kept, worker_estimates


def choosable(job: Job, stages: Sequence[StageEstimate]) -> Iterator[ScheduleEstimate]:
    """Every schedule of the catalogue but the window, which is made as large as the links need and memory allows. What
    halves of a backward take is measured in the run."""
    limit = job.plan.schedule.memory or 0
    for name in schedule_names():
        if name == "window":
            continue
        try:
            made = _made(job, name)
        except ScheduleRefused as refused:
            yield ScheduleEstimate(name, (), 0, refused.reason)
            continue
        in_flight, taken = _room(made, stages)
        reason = "" if taken <= limit else "takes more than schedule.memory"
        halves = made.halves_backwards
        yield ScheduleEstimate(name, in_flight, taken, (_unsplit(stages) if halves else "") or reason, halves)


def without_room(job: Job, stages: Sequence[StageEstimate]) -> Iterator[PlanError]:
    """An error if the schedule that the run begins with has no room: it holds the fewest microbatches."""
    limit = job.plan.schedule.memory
    if limit is None:
        return
    _, taken = _room(job.schedule, stages)
    if taken > limit:
        yield PlanError(
            "schedule.memory",
            f"a worker takes {taken} bytes with {job.schedule.name}, with which the run begins, and which holds the "
            f'fewest microbatches that keep every worker busy. Use "{-(-taken // 2**20)}MiB" or more, more stages, or '
            f'smaller microbatches; or name = "window" with fewer of them in flight',
            value=str(limit),
        )


def _made(job: Job, name: str) -> Schedule:
    placement, first = job.schedule.placement, job.schedule.first_trainable
    return make_schedule(name, placement, job.schedule.microbatches, first_trainable=first)


def _room(schedule: Schedule, stages: Sequence[StageEstimate]) -> tuple[tuple[int, ...], int]:
    """The microbatches in flight, and the bytes of the worker that takes most."""
    verdict = check_schedule(schedule)
    peaks, halfway = verdict.stage_peak, verdict.halfway_peak
    taken = [
        sum(stages[n].with_in_flight(peaks[n]).total + (stages[n].halfway or 0) * halfway[n] for n in owned)
        for owned in schedule.placement
    ]
    return peaks, max(taken)


def _unsplit(stages: Sequence[StageEstimate]) -> str:
    """Why not all of them can split a backward; "" if they can."""
    whole = [str(each.stage) for each in stages if each.halfway is None]
    if not whole:
        return ""
    named = f"stage {whole[0]}" if len(whole) == 1 else f"stages {', '.join(whole)}"
    return f"splits backwards in two halves, and {named} cannot, since activations are recomputed there"


def estimate(plan: Plan) -> Estimate:
    """Loads model and data and runs a microbatch.

    Raises `PlanRefused`, `ModelRefused` or `DataError` if the plan cannot work.
    """
    return estimate_of(prepare(plan))


def estimate_of(job: Job, watch: TrialWatch = UNWATCHED) -> Estimate:
    """`estimate` for a job that is loaded. Its stages cannot be trained afterwards: see `dry_run`."""
    plan = job.plan
    _demand_last_batches(job, watch)
    kept = try_prefix(job, watch.doing)
    stages, messages = dry_run(job, watch)
    queues = queue_estimates(job, messages)
    replicas = [*further_copies(job, stages)]
    workers = worker_estimates(job, [*stages, *replicas], queues)
    stage_errors = [*_overflows(job, queues), *_over_limit(plan, stages), *without_room(job, stages)]
    if errors := [*stage_errors, *over_limit(job, workers)]:
        raise PlanRefused(errors)
    return Estimate(
        digest=plan.digest(),
        plan=plan.as_mapping(),
        origins=dict(plan.origins),
        warnings=(*plan.warnings, *_spills(job, queues), *_unused(job)),
        steps=job.steps,
        stages=stages,
        queues=queues,
        workers=workers,
        idle=job.verdict.idle,
        prefix_cache=kept,
        replicas=replicas,
        schedules=tuple(choosable(job, stages)) if plan.schedule.is_auto else (),
    )


def _demand_last_batches(job: Job, watch: TrialWatch) -> None:
    """The first batch is tried; the last of an epoch, and the last that is evaluated, may have fewer rows. Raises
    `DataError` if the model is known not to take one of them."""
    if not job.segments[0].refuses_inputs:
        return
    feed, choice = job.feed, job.plan.schedule
    last = [(f"batch({feed.last_of_epoch})", partial(feed.batch, feed.last_of_epoch), choice.microbatches)]
    held_out = "the last batch of the rows held out"
    if job.rounds.batches:
        last.append((held_out, partial(feed.held_out_batch, job.rounds.batches - 1), choice.in_step))
    for name, ask, microbatches in last:
        watch.doing(f"{job.plan.data.origin}: {name}")
        inputs, _ = ask()
        try:
            job.segments[0].check_inputs(inputs, microbatches)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error


def _unused(job: Job) -> Iterator[str]:
    """A warning of a cache that is never read."""
    if job.plan.caches_prefix and job.replayed_from is None:
        yield (
            f"model.prefix_cache: the run has {job.steps} steps, an epoch has {job.known_length.epoch}: nothing would "
            "be used a second time, so nothing is kept."
        )


def _spills(job: Job, queues: list[QueueEstimate]) -> Iterator[str]:
    """Warnings of workers whose messages have no room in memory: the rest goes to the disk until it is trimmed."""
    limit = job.plan.queues.retain_bytes
    for worker, needed in enumerate(_by_worker(job, queues)):
        if needed > limit:
            yield (
                f"worker {worker} keeps {needed} bytes of messages, {limit} of them in memory, the rest on disk. Use "
                f'queues.retain_bytes = "{ceil(needed / 2**20)}MiB" or more if there is memory for it.'
            )


def _overflows(job: Job, queues: list[QueueEstimate]) -> Iterator[PlanError]:
    """Where snapshots are written, only a checkpoint lets messages go: all since the last one must have room.

    Without room for the next one's step too, every worker would wait for a checkpoint that none comes to write.
    """
    plan = job.plan
    if plan.queues.in_one_process:
        return
    every = plan.recovery.snapshot_every
    room = (1 + SPILL) * plan.queues.retain_bytes
    for worker, needed in enumerate(_by_worker(job, queues)):
        if needed > room:
            steps = max(steps_kept(job, stage) for stage in job.schedule.placement[worker])
            of = f"{steps} steps (recovery.snapshot_every is {every})" if plan.recovery.on else "one step"
            smaller = ", or a smaller recovery.snapshot_every" if plan.recovery.on else ""
            yield PlanError(
                "queues.retain_bytes",
                f"worker {worker} keeps the messages of {of}, {needed} bytes, and has room for {room} in memory and on "
                f'disk: it would wait for ever. Use "{ceil(needed / (1 + SPILL) / 2**20)}MiB" or more{smaller}',
                value=str(plan.queues.retain_bytes),
            )


def _over_limit(plan: Plan, stages: list[StageEstimate]) -> Iterator[PlanError]:
    """The stages that take more than the plan allows, as far as that is known."""
    limit = plan.model.stage_memory
    for stage in stages:
        if limit is not None and stage.group == 1 and stage.total > limit:
            yield PlanError(
                "model.stage_memory",
                f"stage {stage.stage}, of layers {stage.layers[0]} to {stage.layers[-1]}, takes {stage.total} bytes; "
                f"raise the limit, cut elsewhere, or leave model.cut out, to be cut so that stages fit",
                value=str(limit),
            )


def _by_worker(job: Job, queues: list[QueueEstimate]) -> list[int]:
    """The bytes of messages that each worker keeps at most."""
    return [sum(queue.retained for queue in queues if queue.producer in stages) for stages in job.plan.placement]
