"""Checks of a plan's keys against each other, each key valid by itself: a table of checks and the keys they read."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from . import schedule_checks, stage_checks, staying, training_checks
from .errors import PlanError
from .keys.models import PlanTables
from .refusals import refused_pairs


def problems(plan: PlanTables, refused: Collection[str] = ()) -> list[PlanError]:
    """Return every disagreement between keys of a plan, each with its key and reason alone.

    Args:
        plan: The tables, each key valid by itself.
        refused: Keys that have no value to check. A check that reads one of them is left out.
    """
    found = list(refused_pairs(plan, lambda key: _is_among(key, refused)))
    paired = {problem.key for problem in found}  # refused once
    found += [problem for problem in _found_by(_CHECKS, plan, refused) if problem.key not in paired]
    return found + list(_found_by(_LAST, plan, [*refused, *(problem.key for problem in found)]))


def _found_by(
    checks: "Iterable[tuple[Sequence[str], Check]]", plan: PlanTables, refused: Collection[str]
) -> Iterator[PlanError]:
    for keys, check in checks:
        if not any(_is_among(key, refused) for key in keys):
            yield from check(plan)


def _is_among(key: str, refused: Collection[str]) -> bool:
    return any(overlap(key, bad) for bad in refused)


def overlap(one: str, other: str) -> bool:
    """Return True if two dotted keys are equal, or if one names a table that contains the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _codecs(plan: PlanTables) -> Iterator[PlanError]:
    """Yield an error for each name in `queues.codec` that is not a queue between two of the stages."""
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


Check = Callable[[PlanTables], Iterator[PlanError]]

_STAGES = ("model.cut", "model.stages")
_IN_STEP = ("schedule.microbatches", "schedule.accumulate")
_DATASET = tuple(f"data.{key}" for key in training_checks.WITH_DATASET)
_ORDER = ("schedule.name", "schedule.mode", "schedule.window", "schedule.times", "schedule.file", "schedule.rows")

_CHECKS: tuple[tuple[tuple[str, ...], Check], ...] = (
    (("run.steps", "run.epochs"), training_checks.length),
    (("data.source", "model.metrics"), training_checks.scripted),
    (("data.source", "data.dataset", *_DATASET), training_checks.data),
    (_STAGES, training_checks.number_of_stages),
    (("model.balance", "model.stage_memory", *_STAGES), training_checks.balance),
    (("data.batch_size", "schedule.microbatches"), training_checks.rows),
    (("schedule.name", "schedule.mode", "schedule.microbatches"), training_checks.asynchronous),
    (("schedule.name", "schedule.mode", "schedule.microbatches", *_STAGES), schedule_checks.delayed),
    (_IN_STEP, training_checks.accumulated),
    (("evaluation", "model.metrics", "data.dataset", "data.held_out"), training_checks.evaluation),
    (("schedule.name", "schedule.window", *_STAGES), schedule_checks.window),
    (("queues.codec", *_STAGES), _codecs),
    (("schedule.name", "schedule.times"), schedule_checks.timed),
    (("schedule.name", "schedule.file", "schedule.rows"), schedule_checks.listed),
    (("schedule", "workers", *_STAGES), schedule_checks.auto),
    (("recovery.restarts", "recovery.snapshot_every"), _recovery),
    (("workers", "stage", *_STAGES), stage_checks.owners),
    (("workers", "stage", *_STAGES, *_IN_STEP), stage_checks.replicated),
    (("workers", "stage", *_STAGES), stage_checks.groups),
    (("workers", "model.weights"), stage_checks.weights),
    (("workers", "stage", "memory", *_STAGES), stage_checks.tight),
)

# Checks of keys that the others found sound, so that no error is given twice.
_LAST: tuple[tuple[tuple[str, ...], Check], ...] = (
    (("workers", "stage", *_STAGES, *_IN_STEP, *_ORDER), schedule_checks.shape),
    (
        ("data.stays", "data.labels_stay", "data.targets", "data.source", "workers", "stage", *_STAGES),
        staying.staying,
    ),
)
