"""What the process of each worker takes at most, from what its stages and its messages take."""

from collections.abc import Collection, Iterator, Sequence
from functools import reduce

from stageline.broker.codec.message import Flow
from stageline.pipeline.budget import StageLoad, WorkerRoom
from stageline.pipeline.budget.load import limit_for
from stageline.pipeline.plan import PlanError
from stageline.pipeline.stage.offload import AHEAD
from stageline.workers.disk.scratch_files import BACKLOG
from stageline.workers.preflight.results.trial_result import QueueEstimate, StageEstimate, WorkerEstimate
from stageline.workers.runtime.job import Job

_SAVED = ("weights", "optimizer", "averages", "stashed_weights")  # what a snapshot copies of what a stage holds


def worker_estimates(
    job: Job, stages: Sequence[StageEstimate], queues: Sequence[QueueEstimate]
) -> list[WorkerEstimate]:
    """In the order of the workers. `stages` are those of the model, then their further replicas."""
    found = []
    for worker, room in enumerate(worker_rooms(job, stages, queues)):
        load = reduce(StageLoad.beside, (_planned_load(job, stages[stage]) for stage in job.plan.placement[worker]))
        found.append(WorkerEstimate(worker, room.parts(load), room.peak(load), room.limit))
    return found


def worker_rooms(job: Job, stages: Sequence[StageEstimate], queues: Sequence[QueueEstimate]) -> list[WorkerRoom]:
    """What each worker takes besides its stages, and how much it may take."""
    model = 0 if job.plan.loads_weights else sum(each.bytes["weights"] for each in stages[: job.schedule.stages])
    own = [[stages[stage] for stage in placed] for placed in job.plan.placement]
    return [
        WorkerRoom(_messages(job, each, queues), model, BACKLOG + AHEAD, AHEAD, job.plan.limit_of(worker))
        for worker, each in enumerate(own)
    ]


def stage_load(job: Job, stage: StageEstimate, offload: Collection[str], *, recomputes: bool) -> StageLoad:
    """What a stage takes of its worker that has `offload` in files. Snapshots are copied after an update, which has
    cleared the gradients."""
    in_files = stage.with_files(offload)
    copies = job.plan.recovery.on and job.plan.queues.url != "memory://"
    copies_in_files = bool({"weights", "optimizer"} & {*offload})
    return StageLoad(
        held=stage.total - in_files.offloaded - in_files.in_files,
        working=stage.working,
        copied=_copied(stage) if copies and not copies_in_files else 0,
        offloaded=in_files.offloaded,
        compiler=recomputes,
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


def _planned_load(job: Job, stage: StageEstimate) -> StageLoad:
    of = job.schedule.replicas.stage(stage.stage)
    return stage_load(job, stage, job.plan.offloaded_of(of), recomputes=job.plan.recompute_of(of) is not None)


def _copied(stage: StageEstimate) -> int:
    """Beyond the gradients, which are not there at the time."""
    return max(0, sum(stage.bytes[part] for part in _SAVED) - stage.bytes["gradients"])


def _messages(job: Job, own: Sequence[StageEstimate], queues: Sequence[QueueEstimate]) -> int:
    """Activations that are in flight count with the stage that has them stashed, not here."""
    numbers = {stage.stage: stage for stage in own}
    retained = 0
    for queue in queues:
        if queue.producer in numbers:
            stashed = numbers[queue.producer].in_flight if queue.queue.startswith(f"{Flow.FORWARD}-") else 0
            retained += max(0, queue.retained - stashed * queue.message)
    waiting = sum(queue.message * queue.in_flight for queue in queues if queue.consumer in numbers)
    return min(retained, job.plan.queues.retain_bytes) + waiting
