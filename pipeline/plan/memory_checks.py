"""Checks of a plan: how much memory workers may take, and what lies in files meanwhile."""

from collections.abc import Iterator

from .errors import PlanError
from .keys.models import PlanTables


def offload(plan: PlanTables) -> Iterator[PlanError]:
    if plan.queues.url == "memory://":
        for key in plan.offloads:
            yield PlanError(key, 'queues.url = "memory://" does not support it; use another url, or leave it out')
    for index, worker in enumerate(plan.workers):
        wanted = {_offload_key(plan, stage): plan.offloaded_of(stage) for stage in worker.stages}
        for key, parts in wanted.items():
            if parts and worker.device != "cpu":
                yield PlanError(
                    key,
                    f"worker {index} computes on {worker.device}, and offload supports only the CPU; leave it out, or "
                    'use memory.recompute = "stage"',
                )


def _offload_key(plan: PlanTables, stage: int) -> str:
    return "memory.offload" if plan.stage_plan(stage).offload is None else f"stage.{stage}.offload"


def limit(plan: PlanTables) -> Iterator[PlanError]:
    """What a limit does not support, since the memory of workers is not estimated there."""
    for key in plan.limit_keys:
        yield from (PlanError(key, reason) for reason in _without_limit(plan))
    for index, worker in enumerate(plan.workers):
        if worker.device != "cpu" and plan.limit_of(index) is not None:
            yield PlanError(
                "memory.limit" if worker.memory is None else f"workers.{index}.memory",
                f"worker {index} computes on {worker.device}, and a limit supports only the CPU; leave it out, or set "
                "workers.N.memory for the workers on the CPU",
            )


def tight(plan: PlanTables) -> Iterator[PlanError]:
    """It names workers that have a limit."""
    named = () if plan.memory is None else plan.memory.tight or ()
    for worker in named:
        if plan.workers and worker >= len(plan.workers):
            yield PlanError(
                "memory.tight", f"there is no worker {worker}: the plan has workers 0 to {len(plan.workers) - 1}"
            )
        elif not plan.limit_keys or (plan.workers and plan.limit_of(worker) is None):
            yield PlanError(
                "memory.tight",
                f"worker {worker} has no limit; set memory.limit or workers.{worker}.memory, or leave {worker} out",
            )


def loose_stage_memory(plan: PlanTables) -> Iterator[str]:
    """A warning of stages that may be cut as large as all that a worker may take, or larger."""
    stage, schedule = plan.model.stage_memory, plan.schedule.memory
    if stage is None:
        return
    if plan.schedule.is_auto and schedule is not None and stage > schedule:
        yield (
            f"model.stage_memory = {stage} is more than schedule.memory = {schedule}: a stage of that size may fit no "
            "schedule. Use a smaller model.stage_memory, or a larger schedule.memory."
        )
    limits = _limits(plan)
    if limits and stage >= max(limits.values()):
        key = max(limits, key=lambda key: limits[key])
        yield (
            f"model.stage_memory = {stage} is not less than {key} = {limits[key]}: a stage of that size would leave "
            "its worker no room for messages and snapshots, and would have to recompute or offload. Use a smaller "
            f"model.stage_memory, or leave it out: {key} alone limits the worker."
        )


def _limits(plan: PlanTables) -> dict[str, int]:
    """Of all workers, by key; none if one of them has none."""
    of_all = None if plan.memory is None else plan.memory.limit
    own = {f"workers.{index}.memory": each.memory for index, each in enumerate(plan.workers)}
    if of_all is None and (not own or None in own.values()):
        return {}
    shared = {} if of_all is None or (own and None not in own.values()) else {"memory.limit": of_all}
    return shared | {key: limit for key, limit in own.items() if limit is not None}


def _without_limit(plan: PlanTables) -> Iterator[str]:
    """Each with the way out."""
    if plan.scripted:
        yield 'a script has no batch for a trial before the run; leave it out, and set recompute yourself, as "stage"'
    if plan.queues.url == "memory://":
        yield 'with queues.url = "memory://" all workers share one process; use another url, or leave it out'
    if plan.schedule.is_auto:
        yield (
            'schedule.name = "auto" may change how many microbatches are in flight; name a schedule, or use '
            "schedule.memory alone"
        )
    groups = [name for name, table in (plan.stage or {}).items() if table.processes > 1]
    for stage in groups:
        yield (
            f"stage {stage} is computed by several processes, whose memory is not estimated; leave the limit or the "
            "processes out"
        )
