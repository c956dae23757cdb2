"""What the keys of a plan must agree on once each is valid by itself: a table of checks, and the keys each reads."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from stageline.pipeline import schedule
from stageline.pipeline.schedule.replicas import dealt
from stageline.pipeline.schedule.replicated import NAMES as REPLICATED

from .errors import PlanError
from .keys.models import PlanTables
from .keys.training import MOST_LISTED, MOST_MICROBATCHES, StagePlan
from .staying import problems_of_staying

MOST_SIMULATED = 10_000  # forwards of a step: the broker simulates one with every schedule, and must not be away for it

_SHOWN_FAULTS = 20  # of a schedule's rows

SCRIPT_SUMS = ("rows", "loss")  # what an evaluation for a script returns besides the metrics


def problems(plan: PlanTables, refused: Collection[str] = ()) -> list[PlanError]:
    """Every disagreement, by its key and reason alone.

    A check that reads a key of `refused` is left out: that key has no value to check.
    """
    sound = [check for keys, check in _CHECKS if not any(overlap(key, bad) for key in keys for bad in refused)]
    return [problem for check in sound for problem in check(plan)]


def overlap(one: str, other: str) -> bool:
    """Whether one of two dotted keys is the other, or a part of it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _length(plan: PlanTables) -> Iterator[PlanError]:
    if plan.scripted:
        return
    match plan.run.steps, plan.run.epochs:
        case None, None:
            yield PlanError("run.steps", "set how long to train: steps = 1000, or epochs = 10")
        case int(), int(epochs):
            yield PlanError("run.steps", f"epochs = {epochs} is given too; keep one of the two")


def _scripted(plan: PlanTables) -> Iterator[PlanError]:
    """What only a run with a data source of its own can have."""
    if not plan.scripted:
        return
    for key in ("steps", "epochs"):
        if getattr(plan.run, key) is not None:
            yield PlanError(f"run.{key}", "the script decides how long it trains; leave it out")
    if plan.caches_prefix:
        yield PlanError(
            "model.prefix_cache",
            "a script's batches do not say which samples they have; leave it out, or train by a plan",
        )
    if plan.lr_scheduler is not None and plan.lr_scheduler.every == "epoch":
        yield PlanError("lr_scheduler.every", "a script's epochs are not known; use a number of steps")
    if plan.schedule.mode != "sync":
        yield PlanError("schedule.mode", 'a script trains batch by batch; use mode = "sync"')
    if plan.recovery.record == "all":
        yield PlanError("recovery.record", 'a replay cannot load the objects of a script; use record = "none"')
    for name in plan.model.metrics:
        if re.split("[:.]", name)[-1] in SCRIPT_SUMS:
            yield PlanError(
                "model.metrics", f"{name} has the name of what every evaluation returns; give the function another"
            )


def _evaluation(plan: PlanTables) -> Iterator[PlanError]:
    choice = plan.evaluation
    if choice is None:
        return
    if plan.scripted:
        yield PlanError("evaluation", "a script evaluates when it calls line.evaluate; leave the table out")
        return
    names = ("loss", *plan.metric_names)
    if choice.metric not in names:
        yield PlanError(
            "evaluation.metric",
            f"it is no metric of the run; use {' or '.join(map(repr, names))}, or add it to model.metrics",
        )
    elif choice.metric != "loss" and choice.better is None:
        yield PlanError("evaluation.better", f'say which {choice.metric} is better: better = "higher", or "lower"')
    if "loss" in plan.metric_names:
        yield PlanError(
            "model.metrics", "one has the name of what every evaluation returns, loss; give the function another"
        )
    if choice.every is not None and plan.schedule.mode == "async":
        yield PlanError(
            "evaluation.every",
            'mode = "async" has no moment at which all stages have done the same steps; leave it out, and the rows '
            'held out are evaluated after the last step, or use schedule.mode = "sync"',
        )
    if choice.patience is not None and choice.every is None:
        yield PlanError(
            "evaluation.patience", "it needs several evaluations: add evaluation.every = 100, or leave it out"
        )
    if choice.keep_best and (lacking := _why_best_is_not_kept(plan)):
        yield PlanError("evaluation.keep_best", f"{lacking}, or leave it out")
    if plan.data.dataset is not None and plan.data.held_out is None:
        yield PlanError("data.held_out", 'there are no rows to evaluate: add held_out = "data.py:test"')


def _why_best_is_not_kept(plan: PlanTables) -> str:
    """What the plan lacks for it, and the way out; "" if nothing."""
    if plan.evaluation is not None and plan.evaluation.every is None:
        return "it needs several evaluations: add evaluation.every = 100"
    if plan.queues.url == "memory://":
        return 'over queues.url = "memory://" no checkpoints are written: use another'
    if not plan.recovery.on:
        return "no checkpoints are written: use recovery.restarts = 5 and snapshot_every = 20"
    return ""


_WITH_DATASET = ("held_out", "target", "collate", "shuffle", "num_workers")


def _data(plan: PlanTables) -> Iterator[PlanError]:
    data = plan.data
    if data.source is None and data.dataset is None:
        yield PlanError(
            "data.source", 'say where the batches come from: source = "data.py:batches", or dataset = "data.py:train"'
        )
    elif data.source is not None and data.dataset is not None:
        yield PlanError("data.dataset", f'source = "{data.source}" is given too; keep one of the two')
    elif data.dataset is None:
        for key in _WITH_DATASET:
            if getattr(data, key) is not None:
                yield PlanError(f"data.{key}", "it goes with dataset; a source decides that itself, so leave it out")


def _number_of_stages(plan: PlanTables) -> Iterator[PlanError]:
    match plan.model.cut, plan.model.stages:
        case "auto", None:
            yield PlanError("model.cut", "set the number of stages: add stages = 2")
        case tuple(cut), int(stages) if len(cut) + 1 != stages:
            yield PlanError("model.stages", f"cut = {list(cut)} makes {len(cut) + 1}; leave stages out")


def _balance(plan: PlanTables) -> Iterator[PlanError]:
    model = plan.model
    given = [key for key in ("balance", "stage_memory") if getattr(model, key) not in (None, "parameters")]
    for key in given:
        if plan.scripted:
            yield PlanError(f"model.{key}", "a script has no batch to measure with before its first; give it a cut")
        elif model.cut is None and model.stages is None:
            yield PlanError(f"model.{key}", "set the number of stages: add stages = 2")


def _rows(plan: PlanTables) -> Iterator[PlanError]:
    rows, microbatches = plan.data.batch_size, plan.schedule.microbatches
    if rows < microbatches:
        yield PlanError(
            "data.batch_size",
            f"{rows} rows make no {microbatches} microbatches; "
            f"use batch_size = {microbatches} or more, or schedule.microbatches = {rows} or fewer",
        )


def _asynchronous(plan: PlanTables) -> Iterator[PlanError]:
    if plan.schedule.mode != "async":
        return
    if plan.schedule.microbatches != 1:
        yield PlanError("schedule.microbatches", 'mode = "async" updates after every microbatch; use microbatches = 1')
    if plan.schedule.accumulate != 1:
        yield PlanError("schedule.accumulate", 'mode = "async" updates after every microbatch; use accumulate = 1')
    if plan.schedule.name not in ("1f1b", "auto"):
        yield PlanError("schedule.name", 'mode = "async" is defined for name = "1f1b"; use that, or mode = "sync"')


def _clipping(plan: PlanTables) -> Iterator[PlanError]:
    if plan.clips and plan.schedule.mode == "async":
        yield PlanError(
            "optimizer.clip_norm",
            'mode = "async" has no moment at which all stages have the gradients of one step; leave it out, or use '
            'schedule.mode = "sync"',
        )


def _accumulated(plan: PlanTables) -> Iterator[PlanError]:
    if plan.schedule.in_step > MOST_MICROBATCHES:
        yield PlanError(
            "schedule.accumulate",
            f"microbatches = {plan.schedule.microbatches} of each batch make {plan.schedule.in_step} in a step; use "
            f"values whose product is at most {MOST_MICROBATCHES}",
        )


def _window(plan: PlanTables) -> Iterator[PlanError]:
    named, window, stages = plan.schedule.name == "window", plan.schedule.window, plan.model.stages
    if named and window is None:
        yield PlanError("schedule.window", 'name = "window" needs it: one K for each stage, such as window = [4, 2]')
    elif not named and window is not None:
        yield PlanError(
            "schedule.window", f'name = "{plan.schedule.name}" takes none; use name = "window", or leave it out'
        )
    elif window is not None and stages is not None and len(window) != stages:
        yield PlanError("schedule.window", f"{len(window)} values for {stages} stages; give one K for each stage")


def _codecs(plan: PlanTables) -> Iterator[PlanError]:
    """Every queue that is named must be one between two of the stages."""
    codec, stages = plan.queues.codec, plan.model.stages
    if codec is None or isinstance(codec, str) or stages is None:
        return
    there = [f"forward-{stage}" for stage in range(1, stages)] + [f"backward-{stage}" for stage in range(stages - 1)]
    known = f"there are {', '.join(there)}" if there else "there is none"
    for name in codec:
        if "-" in name and name not in there:
            yield PlanError("queues.codec", f"{name} is no queue between {stages} stages; {known}")


def _timed(plan: PlanTables) -> Iterator[PlanError]:
    if plan.schedule.times is not None and plan.schedule.name != "zb-v":
        yield PlanError(
            "schedule.times", f'name = "{plan.schedule.name}" takes none; use name = "zb-v", or leave them out'
        )


def _listed(plan: PlanTables) -> Iterator[PlanError]:
    choice = plan.schedule
    key = "schedule.file" if choice.file is not None else "schedule.rows"
    if choice.name != schedule.LISTED and (choice.file, choice.rows) != (None, None):
        yield PlanError(key, f'name = "{choice.name}" takes none; use name = "csv", or leave it out')
    elif choice.name == schedule.LISTED and plan.scripted:
        yield PlanError("schedule.name", "a script's run has no schedule from a file; name another, or train by a plan")
    elif choice.name == schedule.LISTED and choice.rows is None:
        needs = 'name = "csv" needs it: a row of actions for each worker, such as file = "schedule.csv"'
        unread = "a file is read with a plan file alone; give its lines, as schedule.rows"
        yield PlanError("schedule.file", needs if choice.file is None else unread)
    elif choice.rows is not None and sum(map(len, choice.rows)) > MOST_LISTED:
        yield PlanError(
            key,
            f"its rows have {sum(map(len, choice.rows))} characters, and a plan that travels has room for "
            f"{MOST_LISTED}; leave empty cells out, or use fewer microbatches",
        )


def _auto(plan: PlanTables) -> Iterator[PlanError]:
    choice, stages = plan.schedule, plan.model.stages or sum(map(len, plan.placement))
    if not choice.is_auto:
        if choice.memory is not None:
            yield PlanError("schedule.memory", f'name = "{choice.name}" takes none; use name = "auto", or leave it out')
        return
    if choice.memory is None:
        yield PlanError(
            "schedule.memory",
            'name = "auto" needs it: schedules differ in how many microbatches they hold. Say what a worker may take '
            'for its stages, such as memory = "4GiB"',
        )
    if choice.mode == "async":
        yield PlanError(
            "schedule.name", 'mode = "async" cannot change its schedule; use name = "1f1b", or mode = "sync"'
        )
    if plan.shares:
        yield PlanError(
            "schedule.name", "a run whose stages have replicas keeps its schedule; name one, or leave replicas out"
        )
    if plan.scripted:
        yield PlanError("schedule.name", "a script's run keeps its schedule; name one, or train by a plan")
    if plan.queues.url == "memory://":
        yield PlanError(
            "schedule.name",
            'over queues.url = "memory://" one process runs all stages, in any order as fast; use name = "1f1b"',
        )
    if stages * choice.in_step > MOST_SIMULATED:
        yield PlanError(
            "schedule.name",
            f"{stages} stages of {choice.in_step} microbatches are too many to simulate with every schedule; at most "
            f"{MOST_SIMULATED} together, or name a schedule",
        )


def _recovery(plan: PlanTables) -> Iterator[PlanError]:
    if "restarts" in plan.recovery.model_fields_set and plan.recovery.restarts and not plan.recovery.snapshot_every:
        yield PlanError(
            "recovery.restarts",
            "a worker can be replaced only where there are snapshots; use snapshot_every = 20, or restarts = 0",
        )


def _cached(plan: PlanTables) -> Iterator[PlanError]:
    if plan.caches_prefix and plan.recovery.on_bad_microbatch == "skip":
        yield PlanError(
            "model.prefix_cache",
            'with recovery.on_bad_microbatch = "skip", samples that are left out in the first epoch have nothing to be '
            'used in later ones; use "halt", or leave it out',
        )


def _record(plan: PlanTables) -> Iterator[PlanError]:
    if plan.recovery.record != "all":
        return
    if plan.queues.url == "memory://":
        yield PlanError("recovery.record", 'over queues.url = "memory://" nothing is recorded in passing; use "bad"')
    elif not plan.recovery.on:
        yield PlanError(
            "recovery.record",
            "a replay begins at a snapshot, and none are written; "
            'use recovery.restarts = 5 and snapshot_every = 20, or record = "bad"',
        )


def _owners(plan: PlanTables) -> Iterator[PlanError]:
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


def _replicated(plan: PlanTables) -> Iterator[PlanError]:
    tables, stages = plan.stage or {}, plan.model.stages
    for name, table in tables.items():
        key = f"stage.{name}"
        if stages is not None and int(name) >= stages:
            yield PlanError(key, f"there are {stages} stages, 0 to {stages - 1}")
        if table.share is not None and len(table.share) != table.replicas:
            yield PlanError(
                f"{key}.share", f"{len(table.share)} values for {table.replicas} replicas; give one for each"
            )
            continue
        empty = [each for each, group in enumerate(dealt(table.shares, plan.schedule.in_step)) if not group]
        if empty:
            yield PlanError(
                f"{key}.replicas",
                f"shares {list(table.shares)} of {plan.schedule.in_step} microbatches leave replica {empty[0]} none; "
                "use more schedule.microbatches, or fewer replicas",
            )
        if table.elastic and table.replicas == 1:
            yield PlanError(f"{key}.elastic", "there are no replicas that could stand in for each other; add replicas")
        if table.elastic and not plan.recovery.on:
            needed = "recovery.restarts and recovery.snapshot_every above 0"
            yield PlanError(f"{key}.elastic", f"a replica that is lost ends the run; it needs {needed}")
        if table.replicas > 1:
            yield from (PlanError(f"{key}.replicas", reason) for reason in _without_replicas(plan))
    for index, worker in enumerate(plan.workers):
        if any(_replicas(plan, stage) > 1 < worker.stages.count(stage) for stage in worker.stages):
            yield PlanError(f"workers.{index}.stages", "a worker has one replica of a stage; name each stage once")


def _without_replicas(plan: PlanTables) -> Iterator[str]:
    """What cannot be had with replicas, each with the way out."""
    if plan.schedule.mode != "sync":
        yield 'replicas update together, at the end of a step; use schedule.mode = "sync"'
    if plan.schedule.name not in REPLICATED:
        yield f'schedule.name = "{plan.schedule.name}" has none; use {", ".join(REPLICATED)}'
    if plan.scripted:
        yield "a script's stages have no replicas; train by a plan"
    if plan.clips:
        yield "optimizer.clip_norm is not computed over replicas; leave one of the two out"
    if plan.caches_prefix:
        yield "model.prefix_cache keeps nothing where stages have replicas; leave one of the two out"
    if plan.taps is not None:
        yield "layers are not tapped where stages have replicas; leave the table [taps] out"
    if plan.recovery.on_bad_microbatch == "skip":
        yield 'no microbatch is left out where stages have replicas; use recovery.on_bad_microbatch = "halt"'
    if plan.recovery.record == "all":
        yield 'nothing is recorded in passing where stages have replicas; use recovery.record = "bad"'


def _groups(plan: PlanTables) -> Iterator[PlanError]:
    """Stages that a group of processes computes."""
    for name, table in (plan.stage or {}).items():
        key = f"stage.{name}"
        if table.tensor > 1 and table.shard > 1:
            yield PlanError(f"{key}.shard", f"{key}.tensor = {table.tensor} is given too; keep one of the two")
        if table.tensor > 1 and table.styles is None:
            yield PlanError(
                f"{key}.tensor", 'say which layers are split: styles = { "*.linear1" = "colwise", ... }, by their names'
            )
        if table.tensor == 1 and table.styles is not None:
            yield PlanError(f"{key}.styles", "they go with several processes: add tensor = 2, or leave them out")
        if table.processes > 1 and table.replicas > 1:
            yield PlanError(f"{key}.{_wanted(table)}", "the stage has replicas, each of one process; leave them out")
        if table.processes > 1:
            reasons = _without_groups(plan, recomputes=plan.recompute_of(int(name)) is not None)
            yield from (PlanError(f"{key}.{_wanted(table)}", reason) for reason in reasons)
    for index, worker in enumerate(plan.workers):
        groups = [stage for stage in worker.stages if plan.stage_plan(stage).processes > 1]
        if len(groups) > 1:
            yield PlanError(
                f"workers.{index}.stages",
                f"stages {' and '.join(map(str, groups))} are each computed by a group; give them to workers of their "
                "own",
            )


def _wanted(table: StagePlan) -> str:
    return "tensor" if table.tensor > 1 else "shard"


def _without_groups(plan: PlanTables, *, recomputes: bool) -> Iterator[str]:
    """What cannot be had with a stage that several processes compute, each with the way out."""
    if plan.queues.url == "memory://":
        yield 'over queues.url = "memory://" all stages are computed by one process; use another'
    if plan.scripted:
        yield "a script's stages are computed by one process each; train by a plan"
    if plan.schedule.mode != "sync":
        yield 'a group keeps one version of its weights; use schedule.mode = "sync"'
    if plan.averages:
        yield "optimizer.ema_decay averages no weights that are split; leave one of the two out"
    if plan.caches_prefix:
        yield "model.prefix_cache keeps nothing beside a group; leave one of the two out"
    if recomputes:
        yield "recompute runs no split layers again; leave one of the two out"
    if plan.offloads:
        yield "memory.offload takes nothing of what several processes keep; leave one of the two out"
    if plan.schedule.is_auto:
        yield 'schedule.name = "auto" does not measure what several processes take; name one, such as 1f1b'
    if plan.taps is not None:
        yield "layers are not tapped beside a group; leave the table [taps] out"
    if plan.recovery.on_bad_microbatch == "skip":
        yield 'no microbatch is left out beside a group; use recovery.on_bad_microbatch = "halt"'
    if plan.recovery.record == "all":
        yield 'nothing is recorded in passing beside a group; use recovery.record = "bad"'


def _weights(plan: PlanTables) -> Iterator[PlanError]:
    if plan.model.weights is not None or not plan.loads_weights:
        return
    for index, worker in enumerate(plan.workers):
        if worker.weights is None:
            yield PlanError(
                f"workers.{index}.weights",
                "other workers read theirs from files; give this one a path too, or all of them model.weights",
            )


def _shape(plan: PlanTables) -> Iterator[PlanError]:
    known = plan.model.stages is not None and any(plan.workers)
    # What the checks above have refused already, the catalogue would refuse a second time.
    if not known or any(
        True
        for check in (_replicated, _asynchronous, _accumulated, _window, _timed, _listed, _owners)
        for _ in check(plan)
    ):
        return
    wanted, name = plan.schedule, plan.schedule.begins_with
    try:
        if wrong := list(_faults_of_rows(plan)):
            yield from wrong
            return
        made = schedule.make_schedule(
            name,
            plan.placement,
            wanted.in_step,
            mode=wanted.mode,
            window=wanted.window,
            times=wanted.times,
            rows=wanted.rows,
            shares=plan.shares,
        )
    except schedule.ScheduleRefused as refused:
        yield PlanError("schedule.name", str(refused))
        return
    if made.halves_backwards:
        yield from _recomputed_in_halves(plan)
        yield from _grouped_in_halves(plan)


def _faults_of_rows(plan: PlanTables) -> Iterator[PlanError]:
    """What is wrong with the rows of a schedule that is written down, each fault an error of its own."""
    choice = plan.schedule
    if choice.rows is None:
        return
    found = schedule.faults(choice.rows, schedule.Shape(choice.name, plan.placement, choice.in_step))
    shown = found[:_SHOWN_FAULTS] + ([f"and {len(found) - _SHOWN_FAULTS} more"] if len(found) > _SHOWN_FAULTS else [])
    for fault in shown:
        yield PlanError("schedule.file" if choice.file is not None else "schedule.rows", fault)


def _recomputed_in_halves(plan: PlanTables) -> Iterator[PlanError]:
    given: dict[str, object] = {"memory.recompute": None if plan.memory is None else plan.memory.recompute}
    given |= {f"stage.{name}.recompute": table.recompute for name, table in (plan.stage or {}).items()}
    for key, wanted in given.items():
        if wanted not in (None, "nothing"):
            yield PlanError(
                key,
                f'schedule.name = "{plan.schedule.name}" splits backwards in two, and each half would compute again; '
                f'leave it out, or use name = "1f1b"',
            )


def _grouped_in_halves(plan: PlanTables) -> Iterator[PlanError]:
    for name, table in (plan.stage or {}).items():
        if table.processes > 1:
            yield PlanError(
                f"stage.{name}.{_wanted(table)}",
                f'schedule.name = "{plan.schedule.name}" halves backwards, which a group does not; leave it out, or '
                'use name = "1f1b"',
            )


def _offload(plan: PlanTables) -> Iterator[PlanError]:
    if not plan.offloads:
        return
    if plan.queues.url == "memory://":
        yield PlanError("memory.offload", 'over queues.url = "memory://" nothing is offloaded; use another')
    for index, worker in enumerate(plan.workers):
        if worker.device != "cpu":
            yield PlanError(
                "memory.offload",
                f"worker {index} computes on {worker.device}, and activations are offloaded from the CPU alone; leave "
                'it out, or use memory.recompute = "stage"',
            )


Check = Callable[[PlanTables], Iterator[PlanError]]

_STAGES = ("model.cut", "model.stages")
_SCHEDULE = (
    *("schedule.name", "schedule.mode", "schedule.microbatches", "schedule.accumulate", "schedule.window"),
    *("schedule.times", "schedule.file", "schedule.rows"),
)

_OF_SCRIPTS = (
    *("run.steps", "run.epochs", "data.source", "schedule.mode", "recovery.record", "model.metrics"),
    *("lr_scheduler.every", "model.prefix_cache"),
)

_NOT_REPLICATED = (
    *("data.source", "optimizer.clip_norm", "model.prefix_cache", "taps"),
    *("recovery.on_bad_microbatch", "recovery.record"),
)

_STAYING = ("data.stays", "data.labels_stay", "data.targets")
_NOT_IN_GROUPS = (
    *("queues.url", "data.source", "schedule.mode", "schedule.name", "optimizer.ema_decay", "model.prefix_cache"),
    *("taps", "memory", "recovery.on_bad_microbatch", "recovery.record"),
)

_KEPT = ("queues.url", "recovery.restarts", "recovery.snapshot_every")

_CHECKS: tuple[tuple[tuple[str, ...], Check], ...] = (
    (("run.steps", "run.epochs"), _length),
    (_OF_SCRIPTS, _scripted),
    (("data.source", "data.dataset", *(f"data.{key}" for key in _WITH_DATASET)), _data),
    (_STAGES, _number_of_stages),
    (("model.balance", "model.stage_memory", "data.source", *_STAGES), _balance),
    (("data.batch_size", "schedule.microbatches"), _rows),
    (("schedule.name", "schedule.mode", "schedule.microbatches", "schedule.accumulate"), _asynchronous),
    (("schedule.microbatches", "schedule.accumulate"), _accumulated),
    (("optimizer.clip_norm", "schedule.mode"), _clipping),
    (
        ("evaluation", "model.metrics", "schedule.mode", "data.source", "data.dataset", "data.held_out", *_KEPT),
        _evaluation,
    ),
    (("schedule.name", "schedule.window", *_STAGES), _window),
    (("queues.codec", *_STAGES), _codecs),
    (("schedule.name", "schedule.times"), _timed),
    (("schedule.name", "schedule.file", "schedule.rows", "data.source"), _listed),
    (("schedule", "queues.url", "data.source", "workers", "stage", *_STAGES), _auto),
    (("recovery.restarts", "recovery.snapshot_every"), _recovery),
    (("model.prefix_cache", "recovery.on_bad_microbatch"), _cached),
    (("recovery.record", "recovery.restarts", "recovery.snapshot_every", "queues.url"), _record),
    (("workers", "stage", *_STAGES), _owners),
    (("workers", "stage", *_STAGES, *_SCHEDULE, *_NOT_REPLICATED), _replicated),
    (("workers", "stage", *_STAGES, *_NOT_IN_GROUPS), _groups),
    (("workers", "model.weights"), _weights),
    (("workers", "memory", "queues.url"), _offload),
    (("workers", "stage", "memory", *_STAGES, *_SCHEDULE, *_NOT_REPLICATED), _shape),
    ((*_STAYING, "data.source", "model.prefix_cache", "workers", "stage", *_STAGES), problems_of_staying),
)
