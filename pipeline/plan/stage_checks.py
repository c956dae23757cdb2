"""Checks of a plan's stages: their workers, replicas, groups of processes and memory."""

import sys
from collections import Counter
from collections.abc import Iterator

from stageline.pipeline.schedule.replicas import dealt

from .errors import PlanError
from .keys.models import PlanTables


def owners(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error for each stage without one worker per replica, and each owned stage that does not exist."""
    owners = Counter(stage for worker in plan.workers for stage in worker.stages)
    count = max(owners, default=-1) + 1 if plan.model.stages is None else plan.model.stages
    for stage in range(count):
        wanted = _replicas(plan, stage)
        if owners[stage] != wanted:
            number = "exactly one worker" if wanted == 1 else f"{wanted} workers, one for each of its replicas"
            yield PlanError("workers", f"stage {stage} is owned by {_owner_names(plan, stage)}; give it to {number}")
    for stage in sorted(stage for stage in owners if stage >= count):
        yield PlanError(
            "workers",
            f"stage {stage} is owned by {_owner_names(plan, stage)}, but there are {count} stages, 0 to {count - 1}",
        )


def _owner_names(plan: PlanTables, stage: int) -> str:
    owners = [f"worker {index}" for index, each in enumerate(plan.workers) for of in each.stages if of == stage]
    return " and ".join(owners) or "no worker"


def _replicas(plan: PlanTables, stage: int) -> int:
    table = (plan.stage or {}).get(str(stage))
    return 1 if table is None else table.replicas


def replicated(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error for each stage with replicas whose number, shares or workers do not fit the plan."""
    tables, stages = plan.stage or {}, plan.model.stages
    for name, table in tables.items():
        key = f"stage.{name}"
        if stages is not None and int(name) >= stages:
            yield PlanError(key, f"there is no stage {name}: the plan has stages 0 to {stages - 1}; leave it out")
        if table.share is not None and len(table.share) != table.replicas:
            yield PlanError(
                f"{key}.share", f"expected {table.replicas} values, one for each replica, got {len(table.share)}"
            )
            continue
        empty = [each for each, group in enumerate(dealt(table.shares, plan.schedule.in_step)) if not group]
        if empty:
            yield PlanError(
                f"{key}.replicas",
                f"shares {list(table.shares)} of {plan.schedule.in_step} microbatches leave none for replica "
                f"{empty[0]}; use more schedule.microbatches, or fewer replicas",
            )
        if table.elastic and table.replicas == 1:
            yield PlanError(
                f"{key}.elastic",
                "it requires several replicas, and the stage has one; add replicas = 2, or leave it out",
            )
    for index, worker in enumerate(plan.workers):
        if any(_replicas(plan, stage) > 1 < worker.stages.count(stage) for stage in worker.stages):
            yield PlanError(f"workers.{index}.stages", "a worker has one replica of a stage; name each stage once")


def groups(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error for each stage whose group of processes is incomplete, or shares a worker with another group."""
    for name, table in (plan.stage or {}).items():
        key = f"stage.{name}"
        if table.tensor > 1 and table.styles is None:
            yield PlanError(
                f"{key}.tensor", 'set which layers are split: styles = { "*.linear1" = "colwise", ... }, by their names'
            )
        if table.tensor == 1 and table.styles is not None:
            yield PlanError(f"{key}.styles", "they require several processes: add tensor = 2, or leave them out")
    for index, worker in enumerate(plan.workers):
        groups = [stage for stage in worker.stages if plan.stage_plan(stage).processes > 1]
        if len(groups) > 1:
            yield PlanError(
                f"workers.{index}.stages",
                f"stages {' and '.join(map(str, groups))} are each computed by several processes; give each to a "
                "worker of its own",
            )


def weights(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error for each worker that does not read weights from files while other workers do."""
    if plan.model.weights is not None or not plan.loads_weights:
        return
    for index, worker in enumerate(plan.workers):
        if worker.weights is None:
            yield PlanError(
                f"workers.{index}.weights",
                "missing, though other workers read weights from files; give this one a path too, or set "
                "model.weights for all",
            )


def tight(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error for each worker in `memory.tight` that does not exist or has no limit."""
    named = () if plan.memory is None else plan.memory.tight or ()
    for worker in named:
        if plan.workers and worker >= len(plan.workers):
            yield PlanError(
                "memory.tight", f"there is no worker {worker}: the plan has workers 0 to {len(plan.workers) - 1}"
            )
        elif not plan.limits or (plan.workers and plan.limit_of(worker) is None):
            yield PlanError(
                "memory.tight",
                f"worker {worker} has no limit; set memory.limit or workers.{worker}.memory, or leave {worker} out",
            )


def loose_stage_memory(plan: PlanTables) -> Iterator[str]:
    """Yield a warning if stages may be cut as large as all that a worker may take, or larger."""
    stage, schedule = plan.model.stage_memory, plan.schedule.memory
    if stage is None:
        return
    if plan.schedule.is_auto and schedule is not None and stage > schedule:
        yield (
            f"model.stage_memory = {stage} is more than schedule.memory = {schedule}: a stage of that size may fit no "
            "schedule. Use a smaller model.stage_memory, or a larger schedule.memory."
        )
    own = [f"workers.{index}.memory" for index in range(len(plan.workers))]
    keys = {key if key in plan.limits else "memory.limit" for key in own or ["memory.limit"]}
    sizes = {key: plan.limits.get(key, sys.maxsize) for key in sorted(keys)}
    key = max(sizes, key=lambda key: sizes[key])
    if stage >= sizes[key]:
        yield (
            f"model.stage_memory = {stage} is not less than {key} = {sizes[key]}: a stage of that size would leave "
            "its worker no room for messages and snapshots, and would have to recompute or offload. Use a smaller "
            f"model.stage_memory, or leave it out: {key} alone limits the worker."
        )
