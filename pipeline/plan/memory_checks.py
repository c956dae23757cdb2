"""Checks of a plan: how much memory workers may take, and what lies in files meanwhile."""

from collections.abc import Iterator

from .errors import PlanError
from .keys.models import PlanTables


def offload(plan: PlanTables) -> Iterator[PlanError]:
    if plan.queues.url == "memory://":
        for key in plan.offloads:
            yield PlanError(key, 'over queues.url = "memory://" nothing is offloaded; use another')
    for index, worker in enumerate(plan.workers):
        wanted = {_offload_key(plan, stage): plan.offloaded_of(stage) for stage in worker.stages}
        for key, parts in wanted.items():
            if parts and worker.device != "cpu":
                yield PlanError(
                    key,
                    f"worker {index} computes on {worker.device}, and {' and '.join(parts)} are offloaded from "
                    'the CPU alone; leave it out, or use memory.recompute = "stage"',
                )


def _offload_key(plan: PlanTables, stage: int) -> str:
    return "memory.offload" if plan.stage_plan(stage).offload is None else f"stage.{stage}.offload"


def limit(plan: PlanTables) -> Iterator[PlanError]:
    """What cannot be had with a limit, since it is not foreseen what workers take."""
    for key in plan.limit_keys:
        yield from (PlanError(key, reason) for reason in _without_limit(plan))
    for index, worker in enumerate(plan.workers):
        if worker.device != "cpu" and plan.limit_of(index) is not None:
            yield PlanError(
                "memory.limit" if worker.memory is None else f"workers.{index}.memory",
                f"worker {index} computes on {worker.device}, and a limit is of workers on the CPU alone; leave it "
                "out, or name limits of the others, as workers.N.memory",
            )


def _without_limit(plan: PlanTables) -> Iterator[str]:
    """Each with the way out."""
    if plan.scripted:
        yield 'a script has no batch to try before its first; say what is recomputed, as in recompute="stage"'
    if plan.queues.url == "memory://":
        yield 'over queues.url = "memory://" all workers are in one process; use another, or leave it out'
    if plan.schedule.is_auto:
        yield (
            'schedule.name = "auto" may change how many microbatches are in flight; name a schedule, or use '
            "schedule.memory alone"
        )
    groups = [name for name, table in (plan.stage or {}).items() if table.processes > 1]
    for stage in groups:
        yield (
            f"stage {stage} is computed by several processes, and what each of them takes is not foreseen; leave one "
            "of the two out"
        )
