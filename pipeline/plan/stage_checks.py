"""What the keys of a plan must agree on: which workers compute a stage, its replicas, and groups of processes."""

from collections import Counter
from collections.abc import Iterator

from stageline.pipeline.schedule.replicas import dealt
from stageline.pipeline.schedule.replicated import NAMES as REPLICATED

from .errors import PlanError
from .keys.models import PlanTables
from .keys.stages import StagePlan


def owners(plan: PlanTables) -> Iterator[PlanError]:
    """Every stage has a worker, and one alone where it has no replicas."""
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
    """Stages with replicas: their workers, and what replicas cannot have."""
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
        if table.elastic and not plan.recovery.on:
            needed = "set recovery.restarts and recovery.snapshot_every above 0, or leave it out"
            yield PlanError(f"{key}.elastic", f"it requires recovery: {needed}")
        if table.replicas > 1:
            yield from (PlanError(f"{key}.replicas", reason) for reason in _without_replicas(plan))
    for index, worker in enumerate(plan.workers):
        if any(_replicas(plan, stage) > 1 < worker.stages.count(stage) for stage in worker.stages):
            yield PlanError(f"workers.{index}.stages", "a worker has one replica of a stage; name each stage once")


def _without_replicas(plan: PlanTables) -> Iterator[str]:
    """What replicas do not support, each with the way out."""
    if plan.schedule.mode != "sync":
        yield 'replicas update together, at the end of a step; use schedule.mode = "sync"'
    if plan.schedule.name not in REPLICATED:
        yield f'schedule.name = "{plan.schedule.name}" does not support replicas; use {", ".join(REPLICATED)}'
    if plan.scripted:
        yield "a script does not support replicas; train with a plan"
    if plan.clips:
        yield "optimizer.clip_norm does not support replicas; leave one of the two out"
    yield from _with_one_process(plan, "replicas")


def groups(plan: PlanTables) -> Iterator[PlanError]:
    """Stages that a group of processes computes."""
    for name, table in (plan.stage or {}).items():
        key = f"stage.{name}"
        if table.tensor > 1 and table.shard > 1:
            yield PlanError(f"{key}.shard", f"{key}.tensor = {table.tensor} is given too; keep one of the two")
        if table.tensor > 1 and table.styles is None:
            yield PlanError(
                f"{key}.tensor", 'set which layers are split: styles = { "*.linear1" = "colwise", ... }, by their names'
            )
        if table.tensor == 1 and table.styles is not None:
            yield PlanError(f"{key}.styles", "they require several processes: add tensor = 2, or leave them out")
        if table.processes > 1 and table.replicas > 1:
            yield PlanError(
                f"{key}.{wanted(table)}",
                "a stage with replicas cannot have several processes; leave one of the two out",
            )
        if table.processes > 1:
            reasons = _without_groups(plan, recomputes=plan.recompute_of(int(name)) is not None)
            yield from (PlanError(f"{key}.{wanted(table)}", reason) for reason in reasons)
    for index, worker in enumerate(plan.workers):
        groups = [stage for stage in worker.stages if plan.stage_plan(stage).processes > 1]
        if len(groups) > 1:
            yield PlanError(
                f"workers.{index}.stages",
                f"stages {' and '.join(map(str, groups))} are each computed by several processes; give each to a "
                "worker of its own",
            )


def wanted(table: StagePlan) -> str:
    """The key by which a group of processes computes the stage."""
    return "tensor" if table.tensor > 1 else "shard"


def _without_groups(plan: PlanTables, *, recomputes: bool) -> Iterator[str]:
    """What a stage that several processes compute does not support, each with the way out."""
    if plan.queues.url == "memory://":
        yield 'with queues.url = "memory://" one process computes all stages; use another url'
    if plan.scripted:
        yield "a script does not support several processes for a stage; train with a plan"
    if plan.schedule.mode != "sync":
        yield 'several processes for a stage keep one version of its weights; use schedule.mode = "sync"'
    if plan.averages:
        yield "optimizer.ema_decay does not support split weights; leave one of the two out"
    if recomputes:
        yield "recompute does not support split layers; leave one of the two out"
    if plan.offloads:
        yield "offload does not support several processes for a stage; leave one of the two out"
    if plan.schedule.is_auto:
        yield 'schedule.name = "auto" does not support several processes for a stage; use another, such as "1f1b"'
    yield from _with_one_process(plan, "several processes for a stage")


def _with_one_process(plan: PlanTables, other: str) -> Iterator[str]:
    """What only a stage of one process supports, and `other` does not; each with the way out."""
    if plan.caches_prefix:
        yield f"model.prefix_cache does not support {other}; leave one of the two out"
    if plan.taps is not None:
        yield f"taps do not support {other}; leave the table [taps] out"
    if plan.recovery.on_bad_microbatch == "skip":
        yield f'recovery.on_bad_microbatch = "skip" does not support {other}; use "halt"'
    if plan.recovery.record == "all":
        yield f'recovery.record = "all" does not support {other}; use "bad"'


def weights(plan: PlanTables) -> Iterator[PlanError]:
    """Where one worker reads weights from files, all do."""
    if plan.model.weights is not None or not plan.loads_weights:
        return
    for index, worker in enumerate(plan.workers):
        if worker.weights is None:
            yield PlanError(
                f"workers.{index}.weights",
                "missing, though other workers read weights from files; give this one a path too, or set "
                "model.weights for all",
            )
