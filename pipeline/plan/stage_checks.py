"""Checks of a plan's stages: their workers, replicas, groups of processes, memory, and where data stays.

    stays = [0], labels_stay = true            worker 0, with the data: stages 0 and 2
                                               worker 1: stage 1

A plan with `data.stays` decides only which worker reads and computes each stage. That a stage's output is no copy of
its input is found when a microbatch is tried; how much an output tells all the same, `stageline audit` measures.
"""

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
    if plan.queues.in_one_process:
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


def offload(plan: PlanTables) -> Iterator[PlanError]:
    if plan.queues.in_one_process:
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
    if plan.queues.in_one_process:
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


_HAS_BOTH = "worker {worker} has the first stage and the last: its batches have targets; leave it out"


def problems_of_staying(plan: PlanTables) -> Iterator[PlanError]:
    """Each way in which the plan breaks what `data.stays` and `data.labels_stay` promise."""
    if plan.scripted:
        yield from _of_a_script(plan)
        return
    if plan.data.stays is None:
        if plan.data.labels_stay:
            yield PlanError("data.labels_stay", "it requires data.stays: set which stages stay, such as stays = [0]")
        elif plan.data.targets is not None and plan.model.stages is not None:
            yield from _unused_targets(plan, plan.model.stages - 1)
        return
    if plan.caches_prefix:
        yield PlanError(
            "model.prefix_cache",
            "a worker that lost its cache draws the rows itself, on any machine; leave it out, or leave data.stays out",
        )
    yield from _stages(plan, plan.data.stays)


def _of_a_script(plan: PlanTables) -> Iterator[PlanError]:
    way_out = "leave it out, or train with a plan"
    if plan.data.stays is not None:
        reason = "a script sends the rows to its workers, and fetches the weights of all stages"
        yield PlanError("data.stays", f"{reason}; {way_out}")
    if plan.data.labels_stay:
        yield PlanError("data.labels_stay", f"a script sends the labels to its workers; {way_out}")
    if plan.data.targets is not None:
        yield PlanError("data.targets", f"a script gives the targets itself; {way_out}")


def _unused_targets(plan: PlanTables, last: int) -> Iterator[PlanError]:
    reads = _owners(plan, last)
    if reads and not {*reads} - {*_owners(plan, 0)}:
        yield PlanError("data.targets", _HAS_BOTH.format(worker=reads[0]))


def _stages(plan: PlanTables, stays: tuple[int, ...]) -> Iterator[PlanError]:
    count = plan.model.stages
    if 0 not in stays:
        yield PlanError("data.stays", f"the rows enter at stage 0; use stays = {sorted({0, *stays})}")
    elif count is not None and max(stays) >= count:
        yield PlanError("data.stays", f"there is no stage {max(stays)}: the plan has stages 0 to {count - 1}")
    elif count is not None and plan.workers:
        kept = {*stays, *([count - 1] if plan.data.labels_stay else [])}
        replicated = sorted(kept & {int(stage) for stage, table in (plan.stage or {}).items() if table.replicas > 1})
        for stage in replicated:
            yield PlanError(
                f"stage.{stage}.replicas", f"stage {stage} stays at one worker (data.stays); leave the table out"
            )
        if not replicated:
            yield from _placed(plan, stays, count - 1)


def _placed(plan: PlanTables, stays: tuple[int, ...], last: int) -> Iterator[PlanError]:
    owners = {
        stage: [index for index, worker in enumerate(plan.workers) if stage in worker.stages]
        for stage in (*stays, last)
    }
    if not all(owners.values()):
        return  # refused as a placement
    home = owners[0][0]
    for stage in stays:
        if owners[stage] != [home]:
            yield PlanError(
                "data.stays",
                f"stage {stage} is at worker {owners[stage][0]}, and the rows are at worker {home}, which has stage 0; "
                f"give both to one worker: workers.{home}.stages = {_with(plan, home, stage)}",
            )
    away = [owner for owner in owners[last] if owner != home]
    if not away and plan.data.targets is not None:
        yield PlanError("data.targets", _HAS_BOTH.format(worker=home))
    elif away and plan.data.labels_stay:
        yield PlanError(
            "data.labels_stay",
            f"worker {away[0]} has the last stage, {last}, which computes the loss and reads the labels; give it "
            f"to worker {home}, which has stage 0: workers.{home}.stages = {_with(plan, home, last)}. "
            "With two stages, cut once more, so that the other worker has the stage between",
        )
    elif away and plan.data.targets is None:
        yield PlanError(
            "data.stays",
            f"worker {away[0]} has the last stage, {last}, and would open {plan.data.origin}, which gives the "
            'rows too; name what gives labels alone, data.targets = "data.py:labels", or use labels_stay = true with '
            f"the last stage at worker {home}",
        )


def _owners(plan: PlanTables, stage: int) -> list[int]:
    """The workers that have it, or a replica of it."""
    return [index for index, worker in enumerate(plan.workers) if stage in worker.stages]


def _with(plan: PlanTables, worker: int, stage: int) -> list[int]:
    return sorted({*plan.workers[worker].stages, stage})
