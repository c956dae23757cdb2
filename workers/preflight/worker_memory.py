"""What the process of each worker takes at most, from what its stages and its messages take.

stages      weights, gradients, optimizer, and what is stashed of the microbatches in flight
working     what operations make and free again: of one stage at a time
messages    those that are kept until a checkpoint lets them go, and those that have come and wait
snapshots   a copy of the stages' state, while it is written: after an update, which has cleared the gradients, and
            before backwards, for which activations are fetched
offload     activations on their way to files and back; what is in files is not in `stages`, nor in `snapshots`
compiler    torch's, which `torch.utils.checkpoint` imports
"""

from collections.abc import Sequence

from stageline.broker.codec.message import Flow
from stageline.pipeline.stage.offload import AHEAD
from stageline.workers.disk.scratch_files import BACKLOG
from stageline.workers.runtime.job import Job

from .trial_result import QueueEstimate, StageEstimate, WorkerEstimate

_SAVED = ("weights", "optimizer", "averages", "stashed_weights")  # what a snapshot copies of what a stage holds
_COMPILER = 70 << 20  # bytes, measured with torch 2.13


def worker_estimates(
    job: Job, stages: Sequence[StageEstimate], queues: Sequence[QueueEstimate]
) -> list[WorkerEstimate]:
    """In the order of the workers. `stages` are those of the model, then their further replicas."""
    model = 0 if job.plan.loads_weights else sum(each.bytes["weights"] for each in stages[: job.schedule.stages])
    found = []
    for worker, placed in enumerate(job.plan.placement):
        own = [stages[stage] for stage in placed]
        parts = {
            "stages": sum(stage.total - stage.offloaded - stage.in_files for stage in own),
            "working": max(stage.working for stage in own),
            "messages": _messages(job, own, queues),
            "snapshots": _copied(own) if _copies_in_memory(job) else 0,
            "offload": _on_the_way(own),
            "compiler": _COMPILER if any(_recomputes(job, stage) for stage in placed) else 0,
        }
        found.append(WorkerEstimate(worker, parts, max(model, sum(parts.values()))))
    return found


def _recomputes(job: Job, copy: int) -> bool:
    return job.plan.recompute_of(job.schedule.replicas.stage(copy)) is not None


def _copied(own: Sequence[StageEstimate]) -> int:
    """Beyond the gradients, and what is fetched ahead for backwards, which are not there at the time."""
    copies = sum(max(0, sum(each.bytes[part] for part in _SAVED) - each.bytes["gradients"]) for each in own)
    return max(0, copies - max(0, _on_the_way(own) - BACKLOG))


def _on_the_way(own: Sequence[StageEstimate]) -> int:
    """Activations to files and back."""
    return min(sum(stage.offloaded for stage in own), BACKLOG + AHEAD)


def _copies_in_memory(job: Job) -> bool:
    if {"weights", "optimizer"} & {*job.plan.offloaded}:
        return False  # the copies are in files, too
    return job.plan.recovery.on and job.plan.queues.url != "memory://"


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
