"""What the keys of a plan must agree on once each is valid by itself: a table of checks, and the keys each reads."""

from collections.abc import Callable, Collection, Iterator

from . import schedule_checks, stage_checks, training_checks
from .errors import PlanError
from .keys.models import PlanTables
from .stage_checks import problems_of_staying


def problems(plan: PlanTables, refused: Collection[str] = ()) -> list[PlanError]:
    """Every disagreement, by its key and reason alone.

    A check that reads a key of `refused` is left out: that key has no value to check.
    """
    sound = [check for keys, check in _CHECKS if not any(overlap(key, bad) for key in keys for bad in refused)]
    return [problem for check in sound for problem in check(plan)]


def overlap(one: str, other: str) -> bool:
    """Whether one of two dotted keys is the other, or a part of it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _codecs(plan: PlanTables) -> Iterator[PlanError]:
    """Every queue that is named must be one between two of the stages."""
    codec, stages = plan.queues.codec, plan.model.stages
    if codec is None or isinstance(codec, str) or stages is None:
        return
    there = [f"forward-{stage}" for stage in range(1, stages)] + [f"backward-{stage}" for stage in range(stages - 1)]
    known = f"use {', '.join(there)}" if there else "there is none, so leave it out"
    for name in codec:
        if "-" in name and name not in there:
            yield PlanError("queues.codec", f'"{name}" is not a queue between {stages} stages; {known}')


def _recovery(plan: PlanTables) -> Iterator[PlanError]:
    if "restarts" in plan.recovery.model_fields_set and plan.recovery.restarts and not plan.recovery.snapshot_every:
        yield PlanError(
            "recovery.restarts",
            "a replacement needs snapshots, and none are written; use snapshot_every = 20, or restarts = 0",
        )


def _cached(plan: PlanTables) -> Iterator[PlanError]:
    if plan.caches_prefix and plan.recovery.on_bad_microbatch == "skip":
        yield PlanError(
            "model.prefix_cache",
            'with recovery.on_bad_microbatch = "skip", samples that are left out in the first epoch would have no '
            'cached rows for later epochs; use "halt", or leave prefix_cache out',
        )


def _record(plan: PlanTables) -> Iterator[PlanError]:
    if plan.recovery.record != "all":
        return
    if plan.queues.in_one_process:
        yield PlanError("recovery.record", 'queues.url = "memory://" does not support it; use record = "bad"')
    elif not plan.recovery.on:
        yield PlanError(
            "recovery.record",
            "a replay begins at a snapshot, and none are written; "
            'use recovery.restarts = 5 and snapshot_every = 20, or record = "bad"',
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

_IN_STEP = ("schedule.microbatches", "schedule.accumulate")
_KEPT = ("queues.url", "recovery.restarts", "recovery.snapshot_every")

_CHECKS: tuple[tuple[tuple[str, ...], Check], ...] = (
    (("run.steps", "run.epochs"), training_checks.length),
    (_OF_SCRIPTS, training_checks.scripted),
    (("data.source", "data.dataset", *(f"data.{key}" for key in training_checks.WITH_DATASET)), training_checks.data),
    (_STAGES, training_checks.number_of_stages),
    (("model.balance", "model.stage_memory", "data.source", *_STAGES), training_checks.balance),
    (("data.batch_size", "schedule.microbatches"), training_checks.rows),
    (("schedule.name", "schedule.mode", *_IN_STEP), training_checks.asynchronous),
    (
        ("schedule.name", "schedule.mode", *_IN_STEP, "model.prefix_cache", "data.source", *_STAGES),
        schedule_checks.delayed,
    ),
    (_IN_STEP, training_checks.accumulated),
    (("optimizer.clip_norm", "schedule.mode"), training_checks.clipping),
    (
        ("evaluation", "model.metrics", "schedule.mode", "data.source", "data.dataset", "data.held_out", *_KEPT),
        training_checks.evaluation,
    ),
    (("schedule.name", "schedule.window", *_STAGES), schedule_checks.window),
    (("queues.codec", *_STAGES), _codecs),
    (("schedule.name", "schedule.times"), schedule_checks.timed),
    (("schedule.name", "schedule.file", "schedule.rows", "data.source"), schedule_checks.listed),
    (("schedule", "queues.url", "data.source", "workers", "stage", *_STAGES), schedule_checks.auto),
    (("recovery.restarts", "recovery.snapshot_every"), _recovery),
    (("model.prefix_cache", "recovery.on_bad_microbatch"), _cached),
    (("recovery.record", "recovery.restarts", "recovery.snapshot_every", "queues.url"), _record),
    (("workers", "stage", *_STAGES), stage_checks.owners),
    (("workers", "stage", *_STAGES, *_SCHEDULE, *_NOT_REPLICATED), stage_checks.replicated),
    (("workers", "stage", *_STAGES, *_NOT_IN_GROUPS), stage_checks.groups),
    (("workers", "model.weights"), stage_checks.weights),
    (("workers", "stage", "memory", "queues.url"), stage_checks.offload),
    (("workers", "stage", "memory", "queues.url", "schedule.name", "data.source"), stage_checks.limit),
    (("workers", "stage", "memory", *_STAGES), stage_checks.tight),
    (("workers", "stage", "memory", *_STAGES, *_SCHEDULE, *_NOT_REPLICATED), schedule_checks.shape),
    ((*_STAYING, "data.source", "model.prefix_cache", "workers", "stage", *_STAGES), problems_of_staying),
)
